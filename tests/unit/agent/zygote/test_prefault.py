"""Page faults that are taken in advance do not happen later."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from taskd.agent.zygote import prefault

SIZE = 64 * prefault.PAGE
TAKE = """
import ctypes, resource
from taskd.agent.zygote import prefault
if {filled}:
    prefault.fill_heap()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = prefault._libc.malloc({size})
ctypes.memset(block, 1, {size})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_a_new_block(filled: bool, size: int) -> int:
    output = subprocess.check_output(
        [sys.executable, "-c", TAKE.format(filled=filled, size=size)], timeout=60
    )
    return int(output)


def test_filled_heap_allocates_without_page_faults() -> None:
    size = 16 << 20
    pages = size // prefault.PAGE
    assert faults_of_a_new_block(filled=False, size=size) >= pages / 2
    assert faults_of_a_new_block(filled=True, size=size) < pages / 10


@contextmanager
def child_that_wrote(address: int, length: int) -> Iterator[int]:
    """A forked child that has written to this part of the memory that it shares with us."""
    (ready, signal_ready), (leave, hold) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        ctypes.memset(address, 2, length)
        os.write(signal_ready, b"!")
        os.read(leave, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        for end in (hold, ready, signal_ready, leave):
            os.close(end)
        os.waitpid(pid, 0)


def faults_of_writing(address: int, length: int, sibling: int) -> int:
    """In another forked child, which first copies the pages that its sibling wrote to."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        prefault.copy_pages_written_by(sibling)
        ctypes.memset(address, 3, 1)  # what the call itself touches for the first time
        before = faults()
        ctypes.memset(address, 3, length)
        os.write(write_end, str(faults() - before).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    count = int(os.read(read_end, 16))
    os.close(read_end)
    os.close(write_end)
    return count


def test_pages_written_by_sibling_are_copied_in_advance() -> None:
    memory = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * 2 * SIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with child_that_wrote(start, SIZE) as sibling:
        assert faults_of_writing(start, SIZE, sibling) < SIZE // prefault.PAGE / 4
        # Pages that no process wrote to stay shared and cost no memory.
        assert faults_of_writing(start + SIZE, SIZE, sibling) >= SIZE // prefault.PAGE / 2


def test_sibling_that_has_exited_is_ignored() -> None:
    with child_that_wrote(0, 0) as gone:
        pass
    prefault.copy_pages_written_by(gone)
