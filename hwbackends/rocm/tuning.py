"""Launch sizes by regime for waves of 64 (CDNA) and of 32 (RDNA). Chosen from what the compiled code objects hold
(registers, no spills: docs/rocm.md), not yet timed on a device; any choice gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hwbackends.triton_ops.launch import cdiv, power_of_two
from hwbackends.triton_ops.traits import SsmShape

if TYPE_CHECKING:
    from hwbackends.ssm.state import SSMState

MAX_THREADS = 1024
"""Threads of one program."""
STREAMED = 1 << 25
"""Elements of x below which extend asks the caches to drop x and the output first: more do not fit them anyway."""
EXTEND_TILES = ((128, (128, 64)), (512, (512, 64)), (2048, (2048, 256)), (1 << 62, (4096, 256)))
"""Requests up to which a choice holds: lengths per tile, threads."""
MAX_REQUEST_PROGRAMS = 64
MAX_TOKEN_PROGRAMS = 128
"""Bounds that keep the work of reading lengths linear in the number of requests."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """See `triton_ops.traits.Tuning`.

    Attributes:
        lanes: threads of a wave.
    """

    lanes: int

    def _warps(self, block: int, each: int) -> int:
        """Waves of a program whose threads hold `each` elements of a block."""
        return max(1, min(MAX_THREADS // self.lanes, block // (each * self.lanes)))

    def decode(self, rows: int, dim: int) -> tuple[int, int]:
        """One wave a program where programs are few; else eight bytes of bfloat16 to a thread."""
        block = min(power_of_two(dim), 256 if rows * dim <= 1 << 18 else 1024)
        return block, self._warps(block, 4)

    def draft(self, requests: int, dim: int) -> tuple[int, int]:
        """As decode, with the rows of every draft in registers."""
        block = min(power_of_two(dim), 256 if requests * dim <= 1 << 17 else 512)
        return block, self._warps(block, 4)

    def extend(self, tokens: int, dim: int) -> tuple[int, int, int]:
        """Eight tokens a program; narrower programs from 2**21 elements on."""
        block = min(power_of_two(dim), 1024 if tokens * dim <= 1 << 21 else 512)
        return block, 8, self._warps(block, 4)

    def streamed(self, tokens: int, dim: int) -> bool:
        """Whether x and the output fit the caches."""
        return tokens * dim < STREAMED

    def epilogue(self, rows: int, dim: int, decode: bool) -> int:
        """Four channels to a thread, as far as a program can have threads."""
        return self._warps(power_of_two(dim), 4)

    def ssm(self, state: SSMState, requests: int, tokens: int, through: bool) -> SsmShape:
        """One wave a program: four lanes share a row of the state, so a wave holds 16 rows of it, or 8. Outputs are
        stored as they come, and the compiler leaves room for two waves: gfx942 spills scalars else."""
        return SsmShape(rows=self.lanes // 4, warps=1, staged=not through, late=False, waves=2)

    def ssm_defers(self, state: SSMState, requests: int) -> bool:
        """Whether a decode on a ring keeps its token there: not yet timed on a device."""
        return False

    def commit(self, dim: int) -> tuple[int, int]:
        """Rows are copied, nothing is computed: eight elements to a thread."""
        block = min(power_of_two(dim), 1024)
        return block, self._warps(block, 8)

    def prepare(self, rows: int) -> tuple[int, int]:
        """One lane a request."""
        block = min(2 * self.lanes, max(self.lanes, power_of_two(rows)))
        return block, block // self.lanes

    def prepare_extend(self, rows: int, tokens: int) -> tuple[int, int, int, int]:
        """Tiles of lengths as wide as the batch, up to 4,096."""
        tile, threads = next(choice for most, choice in EXTEND_TILES if rows <= most)
        warps = max(1, threads // self.lanes)
        requests = max(threads, power_of_two(cdiv(rows, MAX_REQUEST_PROGRAMS)))
        owners = max(min(8 * threads, 1024), power_of_two(cdiv(tokens, MAX_TOKEN_PROGRAMS)))
        return tile, requests, min(owners, 8192), warps
