"""What can be seen of a process that shows no progress: real processes, asked as workers are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskd.agent.process_signs import Signs
from taskd.agent.stacks import StackFile
from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.runtime.clock import monotonic

DEADLINE_S = 30.0
ENOUGH = 25
"""Answers after which a loop would have been recognised several times over."""

PACE = threading.Event()

HEAD = "import sys; from taskd.agent import stacks; stacks.offer(sys.argv[1]); print(flush=True)\n"
SPINS = {
    "one line": "while True: pass",
    "a few lines": "n = 0\nwhile True:\n    n += 1\n    if n < 0:\n        break",
    "through functions": (
        "def look(): return False\ndef ready(): return look()\nwhile not ready():\n    pass"
    ),
}
MOVES = {
    "ever new lines": (
        "import itertools\n"
        "for n in itertools.count():\n"
        "    exec(compile('\\n' * (n % 1000) + 'sum(range(20000))', f'line{n}', 'exec'))"
    ),
    "a file": (
        "import os\nfile = open(os.devnull, 'wb', buffering=0)\n"
        "while True:\n    file.write(bytes(4096))"
    ),
    "memory": (
        "kept = []\nwhile True:\n    kept.append(bytes(5000))\n"
        "    if len(kept) > 40000: kept.clear()"
    ),
    "a child": ("import subprocess\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"),
}
NATIVE = "import hashlib\nwhile True: hashlib.pbkdf2_hmac('sha256', b'', b'', 300_000)"


@contextmanager
def watched(folder: Path, code: str) -> Iterator[tuple[Signs, list[float]]]:
    path = folder / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + code, str(path)], stdout=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    process.stdout.readline()
    asked: list[float] = []

    def ask() -> None:
        asked.append(monotonic())
        os.kill(process.pid, STACK_SIGNAL)

    try:
        yield Signs(process.pid, StackFile(path), ask), asked
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def look(signs: Signs, asked: list[float], answers: int) -> None:
    """Until it spins, or so many answers have come."""
    until = monotonic() + DEADLINE_S
    while not signs.spinning and len(asked) < answers and monotonic() < until:
        PACE.wait(0.06)  # as the agent does: a heart beats in time
        signs.look(monotonic())
        signs.read_stacks(monotonic(), again=True)


@pytest.mark.parametrize("how", SPINS)
def test_a_loop_in_python_is_recognised(tmp_path: Path, how: str) -> None:
    with watched(tmp_path, SPINS[how]) as (signs, asked):
        look(signs, asked, answers=10 * ENOUGH)
        assert signs.spinning
        assert 'File "<string>"' in signs.text


@pytest.mark.parametrize("how", MOVES)
def test_who_does_something_new_moves(tmp_path: Path, how: str) -> None:
    with watched(tmp_path, MOVES[how]) as (signs, asked):
        look(signs, asked, answers=2)
        began = monotonic()
        until = began + DEADLINE_S
        while signs.moved_at < began and monotonic() < until:
            signs.spinning = False
            look(signs, asked, len(asked) + 1)
        assert signs.moved_at >= began


def test_a_native_call_is_no_loop_in_python(tmp_path: Path) -> None:
    with watched(tmp_path, NATIVE) as (signs, asked):
        look(signs, asked, ENOUGH)
        assert not signs.spinning
        assert signs.busy


def test_who_is_asked_while_it_ends_ends_well(tmp_path: Path) -> None:
    code = f"{HEAD}import os, threading\npace = threading.Event()\n"
    # The thread goes on until the very end; but asked by itself without a pause, a process never
    # comes back from the handler.
    code += f"threading.Thread(target=lambda: [os.kill(os.getpid(), {int(STACK_SIGNAL)})"
    code += " for _ in iter(lambda: pace.wait(1e-4), 1)], daemon=True).start()\n"
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")])
        assert ended.returncode == 0
