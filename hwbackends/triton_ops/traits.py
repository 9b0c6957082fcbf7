"""What one kind of device makes different, in one record. A backend fills it in, the launchers ask nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hwbackends.conv.state import ConvState
    from hwbackends.ssm.state import SSMState
    from hwbackends.step.metadata import StepMetadata
    from hwbackends.triton_ops.launch import Launch


@dataclass(frozen=True, slots=True)
class SsmShape:
    """How an SSM kernel is launched.

    Attributes:
        rows: of V in one program, a power of two of at least 8.
        warps: of one program, as many as leave each lane at least 16 bytes of a tile of `kernels_ssm.KI` columns.
        staged: k and q go through a working buffer as float32, instead of being converted for every row of V.
        late: outputs and ring rows are stored behind the last token.
        unroll: tokens of the replay whose loads are issued together.
        registers: most registers of a thread (NVIDIA's alone), so that more programs fit a processor; 0: any.
        waves: of a processor's SIMD that the compiler leaves registers for (AMD's alone); 0: its own choice.
    """

    rows: int
    warps: int
    staged: bool = True
    late: bool = True
    unroll: int = 1
    registers: int = 0
    waves: int = 0

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that it is made of."""
        return {"BV": self.rows, "STAGED": self.staged, "LATE": self.late, "UNROLL": self.unroll}


class Tuning(Protocol):
    """Launch sizes. Any choice gives the same bits; blocks are powers of two."""

    def decode(self, rows: int, dim: int) -> tuple[int, int]:
        """Channels per program and warps of decode, for `rows` requests."""

    def draft(self, requests: int, dim: int) -> tuple[int, int]:
        """Channels per program and warps of verify and draft extend."""

    def extend(self, tokens: int, dim: int) -> tuple[int, int, int]:
        """Channels per program, tokens per program, and warps of extend."""

    def streamed(self, tokens: int, dim: int) -> bool:
        """Whether extend asks the caches to drop x and the output first."""

    def epilogue(self, rows: int, dim: int, decode: bool) -> int:
        """Warps of the fused epilogue, which takes all channels in one program."""

    def commit(self, dim: int) -> tuple[int, int]:
        """Channels per program and warps of the commit, and of copying and clearing slots."""

    def ssm(self, state: SSMState, requests: int, tokens: int, through: bool) -> SsmShape:
        """How decode (`through`: with the state written), verify, draft extend and extend of an SSM are launched."""

    def ssm_defers(self, state: SSMState, requests: int) -> bool:
        """Whether a decode on a ring keeps its token there, instead of writing the state."""

    def prepare(self, rows: int) -> tuple[int, int]:
        """Requests per program and warps of the prepare hooks of uniform phases."""

    def prepare_extend(self, rows: int, tokens: int) -> tuple[int, int, int, int]:
        """Requests per tile of lengths, requests per request program, tokens per token program, warps."""


class Dependents(Protocol):
    """How launches inside a capture may start before those ahead of them have ended."""

    def dependent_launch(self) -> bool:
        """Whether this device does so now."""

    def launch_in_capture(self, launch: Launch, tensors: Sequence[Tensor], span: tuple[int, int], rows: int) -> None:
        """A conv launch while the current stream is captured; `span`: addresses of the state that it reads early and
        writes, `rows`: rows of x."""

    def note_change(self) -> None:
        """While the current stream is captured: metadata or state was written by a plain launch of ours."""


class Attach(Protocol):
    """Gives a decode conv's launch a form that fetches ahead for the next one, where that pays."""

    def __call__(
        self,
        launch: Launch,
        kernel: Any,
        state: ConvState,
        weight: Tensor,
        metadata: StepMetadata,
        options: dict[str, Any],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """One kind of device, as launching sees it.

    Attributes:
        devices: what the tensors must lie on, in words, for refusals.
        lanes: threads of a warp (wave).
        tuning: launch sizes.
        epilogue_channels: channels that one program of the fused epilogue can hold.
        dependents: programmatic dependent launch; None: the device has none, every launch waits for those before.
        fetch_ahead: how decode fetches ahead; None: not at all.
        sizes_compiled_in: the compiler makes other code for tensors that end within 2 GiB. A compiled kernel serves
            tensors of every size, so none is told.
        threads_per_launch: most threads of one launch, None: as many as grids allow.
        refused: a chip that no kernel is launched on, and what is wanted instead; None: this one is served.
        speaks_ptx: kernels may hold instructions of NVIDIA's as text.
    """

    devices: str
    lanes: int
    tuning: Tuning
    epilogue_channels: int
    dependents: Dependents | None = None
    fetch_ahead: Attach | None = None
    sizes_compiled_in: bool = False
    threads_per_launch: int | None = None
    refused: tuple[str, str] | None = None
    speaks_ptx: bool = False


TraitsOf = Callable[[torch.device], Traits]
"""How a backend finds the traits of the device that a call's tensors lie on."""
