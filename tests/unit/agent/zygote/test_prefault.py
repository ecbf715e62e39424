"""agent/zygote/prefault.py: pages that are taken beforehand need not be taken later."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from taskd.agent.zygote import prefault as warm

SIZE = 64 * warm.PAGE
TAKE = """
import ctypes, resource
from taskd.agent.zygote import prefault as warm
if {warmed}:
    warm.fill_heap()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = warm._libc.malloc({size})
ctypes.memset(block, 1, {size})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_a_new_block(warmed: bool, size: int) -> int:
    told = subprocess.check_output(
        [sys.executable, "-c", TAKE.format(warmed=warmed, size=size)], timeout=60
    )
    return int(told)


def test_a_filled_heap_gives_memory_without_asking_the_kernel() -> None:
    size = 16 << 20
    pages = size // warm.PAGE
    assert faults_of_a_new_block(warmed=False, size=size) >= pages / 2
    assert faults_of_a_new_block(warmed=True, size=size) < pages / 10


@contextmanager
def a_child_that_wrote(address: int, length: int) -> Iterator[int]:
    """A fork that has written to this part of the memory that it shares with us."""
    (ready, told), (leave, wanted) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(wanted)
        ctypes.memset(address, 2, length)
        os.write(told, b"!")
        os.read(leave, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        for end in (wanted, ready, told, leave):
            os.close(end)
        os.waitpid(pid, 0)


def faults_of_writing(address: int, length: int, sibling: int) -> int:
    """In another fork of ours, which first has looked at its sibling."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        warm.own_what_others_own(sibling)
        ctypes.memset(address, 3, 1)  # whatever the call itself has to touch for the first time
        before = faults()
        ctypes.memset(address, 3, length)
        os.write(tell, str(faults() - before).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    count = int(os.read(told, 16))
    os.close(told)
    os.close(tell)
    return count


def test_what_a_sibling_wrote_to_is_ours_beforehand() -> None:
    memory = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * 2 * SIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with a_child_that_wrote(start, SIZE) as sibling:
        assert faults_of_writing(start, SIZE, sibling) < SIZE // warm.PAGE / 4
        # What nobody wrote to stays shared, and costs no memory.
        assert faults_of_writing(start + SIZE, SIZE, sibling) >= SIZE // warm.PAGE / 2


def test_a_sibling_that_is_gone_is_no_reason_to_fail() -> None:
    with a_child_that_wrote(0, 0) as gone:
        pass
    warm.own_what_others_own(gone)
