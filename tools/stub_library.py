"""Writes `libtaskd.so`: a shared library that holds nothing.

Image recipes put `taskd/python/cython_api/libs/libtaskd.so` into LD_PRELOAD, and without a file
there the dynamic linker complains in every process of the job. All of TaskD is Python, so the
library exports no symbol and runs no code; it is written byte by byte, because a machine that
installs TaskD need not have a compiler. `setup.py` calls this for the machine that it builds on.

    python tools/stub_library.py FILE [x86_64 | aarch64]
"""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
SONAME = b"libtaskd.so"

# Sizes and constants of ELF64, as in the System V application binary interface.
HEADER, SEGMENT, DYNAMIC, SYMBOL = 64, 56, 16, 24
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
PF_W, PF_R = 2, 4
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 4, 5, 6, 10, 11, 14
PAGE = 0x10000
"""The largest page of both machines: aarch64 kernels are built with 4, 16 or 64 KiB."""


def library(machine: str) -> bytes:
    """The bytes of the library. One writable segment holds everything: the linker writes into
    the dynamic section while it loads."""
    names = b"\0" + SONAME + b"\0"
    segments = 3
    symbols_at = HEADER + segments * SEGMENT
    hash_at = symbols_at + SYMBOL
    names_at = hash_at + 4 * 4
    dynamic_at = _aligned(names_at + len(names), 8)
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (DT_SONAME, 1),
            (DT_HASH, hash_at),
            (DT_STRTAB, names_at),
            (DT_SYMTAB, symbols_at),
            (DT_STRSZ, len(names)),
            (DT_SYMENT, SYMBOL),
            (DT_NULL, 0),
        )
    )
    end = dynamic_at + len(dynamic)
    parts = (
        _header(MACHINES[machine], segments),
        _segment(PT_LOAD, 0, end, PAGE),
        _segment(PT_DYNAMIC, dynamic_at, len(dynamic), 8),
        # Without this one the linker would make the stack of the whole process executable.
        _segment(PT_GNU_STACK, 0, 0, 16),
        bytes(SYMBOL),  # The symbol table has only its obligatory empty entry,
        struct.pack("<4I", 1, 1, 0, 0),  # and so has the hash table over it.
        names.ljust(dynamic_at - names_at, b"\0"),
        dynamic,
    )
    return b"".join(parts)


def _header(machine: int, segments: int) -> bytes:
    magic = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bit, little endian, version 1
    shared_object, version, entry, sections = 3, 1, 0, 0
    return magic + struct.pack(
        "<HHIQQQIHHHHHH",
        *(shared_object, machine, version, entry, HEADER, sections, 0),
        *(HEADER, SEGMENT, segments, 0, 0, 0),
    )


def _segment(kind: int, at: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, PF_R | PF_W, at, at, at, size, size, alignment)


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        print(__doc__, file=sys.stderr)
        return 2
    machine = sys.argv[2] if len(sys.argv) == 3 else platform.machine()
    if machine not in MACHINES:
        print(f"no library for {machine}, only for {', '.join(MACHINES)}", file=sys.stderr)
        return 1
    Path(sys.argv[1]).write_bytes(library(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
