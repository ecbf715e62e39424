"""Memory that is there before it is needed.

A new process gets each page of its memory from the kernel when it first touches it, and a forked
one each page that it shared with its parent when it first writes to it. A replacement does both for
thousands of pages between its first line and its first step, and each costs microseconds. The
understudy (`zygote.py`) has the time to do it beforehand.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

LARGEST = 32 << 20
"""glibc asks the kernel for each larger block, and gives it back; smaller ones it may keep."""
BLOCK, BLOCKS = LARGEST - (1 << 20), 2
"""glibc keeps up to twice the largest block that it was given back."""
PAGE, ENTRY = os.sysconf("SC_PAGE_SIZE"), 8
OWN = 1 << 63 | 1 << 56
"""In the kernel's map of pages: present, and nobody else's."""
POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fill_heap() -> None:
    """Have malloc own enough memory for a small model, its gradients and its optimizer."""
    _libc.free(_libc.malloc(LARGEST - 2 * PAGE))  # from now on it keeps what is given back
    blocks = [block for _ in range(BLOCKS) if (block := _libc.malloc(BLOCK))]
    for block in blocks:
        ctypes.memset(block, 0, BLOCK)
    for block in blocks:
        _libc.free(block)


def own_what_others_own(sibling: int) -> None:
    """Copy now whatever this other child of our parent did not leave as it was.

    Both began as the same memory, so it shows what a rank writes to. Without the right to look, or
    on a kernel before 5.14, pages are copied one by one when they are written, as ever.
    """
    try:
        for start, length in _runs(sibling):
            _libc.madvise(start, length, POPULATE_WRITE)
    except OSError:
        return


def _runs(sibling: int) -> Iterator[tuple[int, int]]:
    """Where in our own memory, and how much."""
    theirs = dict(_writable(Path(f"/proc/{sibling}/maps")))
    with Path(f"/proc/{sibling}/pagemap").open("rb", buffering=0) as pages:
        for start, end in _writable(Path("/proc/self/maps")):
            if theirs.get(start) != end:
                continue
            pages.seek(start // PAGE * ENTRY)
            entries = memoryview(pages.read((end - start) // PAGE * ENTRY)).cast("Q")
            at = start
            for wanted, run in groupby(entries, lambda entry: entry & OWN == OWN):
                length = sum(PAGE for _ in run)
                if wanted:
                    yield at, length
                at += length


def _writable(maps: Path) -> Iterator[tuple[int, int]]:
    for line in maps.read_bytes().splitlines():
        where, rights, *_ = line.split()
        if rights == b"rw-p":
            start, _, end = where.partition(b"-")
            yield int(start, 16), int(end, 16)
