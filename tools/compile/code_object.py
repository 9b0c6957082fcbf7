"""What a compiled kernel says of itself: AMD's code objects in their note (ELF, MessagePack), NVIDIA's through the
cuobjdump that triton brings."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE_SECTION, AMDGPU_METADATA = 7, 32
WAIT = re.compile(r"^\s*s_barrier(_signal\b.*)?\s*$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers of a thread and of a wave (AMD's VGPRs and SGPRs; NVIDIA has the first kind alone), how many of each
    were spilled, bytes of LDS (shared memory) of a program, of scratch (local memory) of a thread, and barriers in the
    code. A spilled scalar lies in a lane of a vector register, a spilled vector in scratch."""

    vectors: int
    scalars: int
    spills: int
    scalar_spills: int
    lds: int
    scratch: int
    barriers: int


def amd(code: bytes, assembly: str) -> Resources:
    """Resources of a code object, and the barriers in its assembly.

    Raises:
        ValueError: no note of the AMDGPU kind, or not of one kernel.
    """
    kernels = decode(note(code))["amdhsa.kernels"]
    if len(kernels) != 1:
        raise ValueError(f"{len(kernels)} kernels in a code object, wanted 1")
    (kernel,) = kernels
    return Resources(
        vectors=kernel[".vgpr_count"],
        scalars=kernel[".sgpr_count"],
        spills=kernel[".vgpr_spill_count"],
        scalar_spills=kernel[".sgpr_spill_count"],
        lds=kernel[".group_segment_fixed_size"],
        scratch=kernel[".private_segment_fixed_size"],
        barriers=len(WAIT.findall(assembly)),
    )


def nvidia(code: bytes, cuobjdump: str) -> Resources:
    """Resources of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        done = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout))
    # ptxas keeps spilled registers on the stack: bytes, where AMD counts registers
    stack = int(found["STACK"]) + int(found["LOCAL"])
    return Resources(int(found["REG"]), 0, stack, 0, int(found["SHARED"]), stack, 0)


def note(code: bytes) -> bytes:
    """The descriptor of the AMDGPU note of an ELF file of 64 bits, little-endian."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    for index in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", code, start + index * size + 4)
        if kind != NOTE_SECTION:
            continue
        end = offset + length
        while offset < end:
            named, described, note_kind = struct.unpack_from("<III", code, offset)
            at = offset + 12 + (named + 3 & ~3)
            if note_kind == AMDGPU_METADATA:
                return code[at : at + described]
            offset = at + (described + 3 & ~3)
    raise ValueError("no AMDGPU metadata in this ELF file")


def decode(data: bytes) -> Any:
    """The first value of a MessagePack document: maps, arrays, strings, booleans, nil and whole numbers."""
    return _value(data, 0)[0]


_SIZES = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
    0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
}  # fmt: skip
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """A value and the offset behind it."""
    lead = data[at]
    at += 1
    if lead < 0x80 or lead >= 0xE0:
        return (lead if lead < 0x80 else lead - 256), at
    if lead in _PLAIN:
        return _PLAIN[lead], at
    if lead < 0xC0:
        count = lead & (0x1F if lead >= 0xA0 else 0x0F)
    elif lead in _SIZES:
        form = _SIZES[lead]
        (count,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        if lead < 0xD9:
            return count, at
    else:
        raise ValueError(f"MessagePack of kind {lead:#x} at {at - 1}")
    if lead < 0x90 or lead in (0xDE, 0xDF):
        return _map(data, at, count)
    if lead < 0xA0 or lead in (0xDC, 0xDD):
        return _array(data, at, count)
    return data[at : at + count].decode(), at + count


def _map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    found = {}
    for _ in range(count):
        key, at = _value(data, at)
        found[key], at = _value(data, at)
    return found, at


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        item, at = _value(data, at)
        found.append(item)
    return found, at
