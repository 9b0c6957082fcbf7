"""Zero the device code of every architecture but one in a shared library, in place: its structure stays, and what is
zero compresses away (52 MB to 9). `python keep_arch.py LIBRARY 90`

The layout of a fat binary's headers is what NVIDIA's own cuobjdump reads: a header of 16 bytes (magic, version, size of
the header, size of the content), then entries of (kind, header size, payload size, ..., architecture at byte 28)."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

MAGIC, CUBIN = b"\x50\xed\x55\xba", 2


def keep(data: bytearray, arch: int) -> int:
    """Zero the rest; bytes that are kept."""
    at, kept = data.find(MAGIC), 0
    while at >= 0:
        _, version, head, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or head != 16 or at + head + size > len(data):  # the magic number by chance
            at = data.find(MAGIC, at + 4)
            continue
        entry, end = at + head, at + head + size
        while entry < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
            own = struct.unpack_from("<I", data, entry + 28)[0]
            if kind == CUBIN and own == arch:
                kept += payload
            else:
                data[entry + header : entry + header + payload] = bytes(payload)
            entry += header + payload
        at = data.find(MAGIC, end)
    return kept


if __name__ == "__main__":
    library = Path(sys.argv[1])
    content = bytearray(library.read_bytes())
    assert keep(content, int(sys.argv[2])), "no device code of that architecture"
    library.write_bytes(content)
