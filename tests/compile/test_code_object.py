"""Reading code objects: MessagePack of every kind that a note holds, and the note of an ELF file."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "compile" / "code_object.py"
    spec = importlib.util.spec_from_file_location("code_object", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["code_object"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7), (b"\xff", -1), (b"\xc0", None), (b"\xc2", False), (b"\xc3", True), (b"\xcc\x80", 128),
        (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536), (b"\xcf" + b"\x00" * 7 + b"\x09", 9),
        (b"\xd0\x80", -128), (b"\xd1\xff\x00", -256), (b"\xa2ok", "ok"), (b"\xd9\x21" + b"x" * 33, "x" * 33),
        (b"\x92\x01\x02", [1, 2]), (b"\xdc\x00\x01\x05", [5]), (b"\x81\xa1a\x91\xc3", {"a": [True]}),
        (b"\xde\x00\x01\xa1b\xa1c", {"b": "c"}),
    ],
)  # fmt: skip
def test_every_kind_of_value_is_read(data: bytes, value: Any) -> None:
    assert tool.decode(data) == value


def test_a_kind_that_notes_do_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="0xca"):
        tool.decode(b"\xca\x00\x00\x00\x00")


def elf(notes: bytes) -> bytes:
    """An ELF file of 64 bits whose second section holds notes."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, 2)
    section = struct.pack("<IIQQQQ", 0, tool.NOTE_SECTION, 0, 0, 64 + 128, len(notes)).ljust(64, b"\x00")
    return bytes(header) + bytes(64) + section + notes


def one_note(kind: int, name: bytes, described: bytes) -> bytes:
    padded = described.ljust(-(-len(described) // 4) * 4, b"\x00")
    return struct.pack("<III", len(name), len(described), kind) + name.ljust(-(-len(name) // 4) * 4, b"\x00") + padded


def test_registers_are_read_from_the_note_behind_another_one() -> None:
    names = {".vgpr_count": 42, ".sgpr_count": 30, ".vgpr_spill_count": 2, ".sgpr_spill_count": 1}
    names |= {".group_segment_fixed_size": 16, ".private_segment_fixed_size": 8}
    body = b"".join(bytes([0xA0 | len(key)]) + key.encode() + bytes([value]) for key, value in names.items())
    kernel = bytes([0x80 | len(names)]) + body
    data = b"\x81" + b"\xae" + b"amdhsa.kernels" + b"\x91" + kernel
    code = elf(one_note(1, b"GNU\x00", b"abcde") + one_note(tool.AMDGPU_METADATA, b"AMDGPU\x00", data))
    found = tool.amd(code, "\ts_barrier\n\ts_barrier_signal -1\n\ts_barrier_wait -1\n")
    assert found == tool.Resources(vectors=42, scalars=30, spills=2, scalar_spills=1, lds=16, scratch=8, barriers=2)


@pytest.mark.parametrize("data", [b"MZ", elf(one_note(1, b"GNU\x00", b""))], ids=["no ELF", "no note"])
def test_what_is_no_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="ELF"):
        tool.note(data)
