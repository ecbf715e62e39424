"""Makes the standby's page faults happen before it becomes a worker.

The kernel gives a new process each page of its memory when the process first touches it, and copies
each page that a forked process shares with its parent when it first writes to it. A replacement
rank has thousands of both between its first line and its first step, and each costs microseconds.
The standby (`zygote.py`) has the time to take these faults in advance.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

LARGEST = 32 << 20
"""glibc maps each larger block separately and unmaps it when freed; it may keep smaller ones."""
BLOCK, BLOCKS = LARGEST - (1 << 20), 2
"""glibc keeps up to twice the size of the largest block that was freed."""
PAGE, ENTRY = os.sysconf("SC_PAGE_SIZE"), 8
PRIVATE = 1 << 63 | 1 << 56
"""Bits of an entry in the kernel's pagemap: present, and mapped by this process only."""
POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fill_heap() -> None:
    """Give malloc enough memory for a small model, its gradients and its optimizer."""
    _libc.free(
        _libc.malloc(LARGEST - 2 * PAGE)
    )  # from now on malloc keeps freed blocks of this size
    blocks = [block for _ in range(BLOCKS) if (block := _libc.malloc(BLOCK))]
    for block in blocks:
        ctypes.memset(block, 0, BLOCK)
    for block in blocks:
        _libc.free(block)


def copy_pages_written_by(sibling: int) -> None:
    """Copy now every page that this other child of our parent has written to.

    Both started with the same memory, so its private pages show what a rank writes to. Without the
    permission to read its pagemap, or on a kernel before 5.14, nothing is copied in advance.
    """
    try:
        for start, length in _runs(sibling):
            _libc.madvise(start, length, POPULATE_WRITE)
    except OSError:
        return


def _runs(sibling: int) -> Iterator[tuple[int, int]]:
    """Start and length of each run of such pages, in our own memory."""
    sibling_maps = dict(_writable(Path(f"/proc/{sibling}/maps")))
    with Path(f"/proc/{sibling}/pagemap").open("rb", buffering=0) as pages:
        for start, end in _writable(Path("/proc/self/maps")):
            if sibling_maps.get(start) != end:
                continue
            pages.seek(start // PAGE * ENTRY)
            entries = memoryview(pages.read((end - start) // PAGE * ENTRY)).cast("Q")
            at = start
            for private, run in groupby(entries, lambda entry: entry & PRIVATE == PRIVATE):
                length = sum(PAGE for _ in run)
                if private:
                    yield at, length
                at += length


def _writable(maps: Path) -> Iterator[tuple[int, int]]:
    for line in maps.read_bytes().splitlines():
        span, permissions, *_ = line.split()
        if permissions == b"rw-p":
            start, _, end = span.partition(b"-")
            yield int(start, 16), int(end, 16)
