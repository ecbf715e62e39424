"""Writes `libtaskd.so`: a shared library without any code or symbol.

Image recipes put `taskd/python/cython_api/libs/libtaskd.so` into LD_PRELOAD. If the file is
missing, the dynamic linker prints an error in every process of the job. All of TaskD is Python, so
the library is empty. It is assembled here byte by byte, because a machine that installs TaskD may
not have a compiler. It depends on no other library, so one file fits every Linux distribution.

    python tools/stub_library.py FILE [x86_64 | aarch64]
"""

from __future__ import annotations

import os
import platform
import struct
import sys
import tempfile
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
SONAME = b"libtaskd.so"

# Sizes and constants of ELF64, as in the System V application binary interface.
HEADER, SEGMENT, DYNAMIC, SYMBOL = 64, 56, 16, 24
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
PF_W, PF_R = 2, 4
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 4, 5, 6, 10, 11, 14
PAGE = 0x10000
"""The largest page size of both machines: aarch64 kernels use 4, 16 or 64 KiB."""


def library(machine: str) -> bytes:
    """Return the bytes of the library.

    One writable segment holds everything: the linker writes into the dynamic section while it
    loads the library.
    """
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
        # Without this segment the linker makes the stack of the whole process executable.
        _segment(PT_GNU_STACK, 0, 0, 16),
        bytes(SYMBOL),  # symbol table: only the mandatory empty entry
        struct.pack("<4I", 1, 1, 0, 0),  # hash table over it: one bucket, one entry
        names.ljust(dynamic_at - names_at, b"\0"),
        dynamic,
    )
    return b"".join(parts)


def write(path: Path, machine: str) -> None:
    """Write the library to a new file and rename it over `path`.

    A running process may have the old file mapped, and would crash if its pages changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(library(machine))
            os.fchmod(file.fileno(), 0o755)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


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
        print(f"unknown machine {machine!r} (expected {' or '.join(MACHINES)})", file=sys.stderr)
        return 1
    write(Path(sys.argv[1]), machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
