"""What a process without progress is doing: real processes, asked as workers are asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskd.agent.process_activity import CpuWait, ProcessActivity, starved_s
from taskd.agent.worker_stacks import StackFile
from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.runtime.clock import monotonic

DEADLINE_S = 30.0
ENOUGH = 25
"""Stack dumps after which a loop would have been recognized several times."""

PACE = threading.Event()

HEAD = (
    "import sys; from taskd.agent import worker_stacks; "
    "worker_stacks.install(sys.argv[1]); print(flush=True)\n"
)
SPINS = {
    "one line": "while True: pass",
    "a few lines": "n = 0\nwhile True:\n    n += 1\n    if n < 0:\n        break",
    "through functions": (
        "def look(): return False\ndef ready(): return look()\nwhile not ready():\n    pass"
    ),
}
MOVES = {
    "new lines all the time": (
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
STARVES = """
import os, threading
os.sched_setaffinity(0, {int(sys.argv[2])})

def starve():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass

threading.Thread(target=starve, daemon=True).start()
threading.Event().wait()
"""
"""Its main thread waits for one that gets a CPU only if no other process wants it."""
NATIVE = "import hashlib\nwhile True: hashlib.pbkdf2_hmac('sha256', b'', b'', 300_000)"


@contextmanager
def watched(folder: Path, code: str, *args: str) -> Iterator[tuple[ProcessActivity, list[float]]]:
    path = folder / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + code, str(path), *args],
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None
    process.stdout.readline()
    asked: list[float] = []

    def ask() -> None:
        asked.append(monotonic())
        os.kill(process.pid, STACK_SIGNAL)

    try:
        yield ProcessActivity(process.pid, StackFile(path), ask), asked
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def look(activity: ProcessActivity, asked: list[float], answers: int) -> None:
    """Look until it spins, or until so many dumps were asked for."""
    until = monotonic() + DEADLINE_S
    while not activity.spinning and len(asked) < answers and monotonic() < until:
        PACE.wait(0.06)  # as often as the agent's heartbeats
        activity.look(monotonic())
        activity.read_stacks(monotonic(), repeat=True)


@pytest.mark.parametrize("how", SPINS)
def test_python_loop_is_recognized_as_spinning(tmp_path: Path, how: str) -> None:
    with watched(tmp_path, SPINS[how]) as (activity, asked):
        look(activity, asked, answers=10 * ENOUGH)
        assert activity.spinning
        assert 'File "<string>"' in activity.text


@pytest.mark.parametrize("how", MOVES)
def test_process_that_does_something_new_is_active(tmp_path: Path, how: str) -> None:
    with watched(tmp_path, MOVES[how]) as (activity, asked):
        look(activity, asked, answers=2)
        began = monotonic()
        until = began + DEADLINE_S
        while activity.active_at < began and monotonic() < until:
            activity.spinning = False
            look(activity, asked, len(asked) + 1)
        assert activity.active_at >= began


def test_native_call_is_busy_and_not_spinning(tmp_path: Path) -> None:
    with watched(tmp_path, NATIVE) as (activity, asked):
        look(activity, asked, ENOUGH)
        assert not activity.spinning
        assert activity.busy


def test_time_without_a_cpu_is_measured(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    hog = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    with (
        watched(tmp_path, STARVES, str(cpu)) as (activity, _),
        subprocess.Popen([sys.executable, "-c", hog]) as process,
    ):
        until = monotonic() + DEADLINE_S
        while activity.starved_s < 0.5 and monotonic() < until:
            PACE.wait(0.06)
            activity.look(monotonic())
        process.kill()
        assert activity.starved_s >= 0.5


def test_thread_that_runs_or_sleeps_does_not_wait_for_a_cpu() -> None:
    ran, slept = CpuWait(0, 5, True), CpuWait(7, 5, False)
    assert starved_s({"1": ran, "2": slept}, {"1": CpuWait(9, 5, True), "2": slept}, 1.0) == 0.0
    waited = CpuWait(7, 5 + 10**9 // 4, False)
    assert starved_s({"1": ran, "2": slept}, {"1": ran, "2": waited}, 1.0) == 1.0
    assert starved_s({"2": slept}, {"2": waited, "3": CpuWait(0, 10**9, False)}, 1.0) == 0.25


@pytest.mark.parametrize(
    ("code", "busy"),
    [
        ("import subprocess; subprocess.run(['sleep', '1000'])", True),
        ("import subprocess, threading; one = subprocess.Popen(['sleep', '1000'])\n"
         "threading.Event().wait()", False),
    ],
    ids=["waits for its child", "has a child"],
)  # fmt: skip
def test_process_that_waits_for_its_child_is_busy(tmp_path: Path, code: str, busy: bool) -> None:
    with watched(tmp_path, code) as (activity, asked):
        look(activity, asked, ENOUGH)
        assert activity.busy is busy


def test_process_that_waits_for_a_stopped_child_is_not_busy(tmp_path: Path) -> None:
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    code = f"import subprocess\nsubprocess.run([sys.executable, '-c', {stops!r}])"
    with watched(tmp_path, code) as (activity, asked):
        look(activity, asked, ENOUGH)
        until = monotonic() + DEADLINE_S
        while activity.busy and monotonic() < until:  # the child may still be starting
            look(activity, asked, len(asked) + 1)
        assert not activity.busy


@pytest.mark.parametrize(
    ("file", "waits"),
    [("taskd/torch/groups/transport.py", True), ("taskd/torch/startup/start_mark.py", False)],
)
def test_wait_for_the_store_is_not_a_wait_for_peers(tmp_path: Path, file: str, waits: bool) -> None:
    code = f"exec(compile('import signal; signal.pause()', '/lib/{file}', 'exec'))"
    with watched(tmp_path, code) as (activity, asked):
        activity.in_step = False
        look(activity, asked, answers=3)
        assert file in activity.text
        assert activity.waits_for_peers is waits


def test_process_whose_threads_run_is_not_hurt_by_the_question(tmp_path: Path) -> None:
    code = f"""{HEAD}import json, os, pickle, threading
    def work():
        there = {{str(n): [n, {{"n": n}}] for n in range(50)}}
        while True:
            json.dumps(there, indent=1)
            pickle.loads(pickle.dumps(there))
            sorted(there.items(), key=lambda item: item[1][0])
    threading.Thread(target=work, daemon=True).start()
    pace = threading.Event()
    for _ in range(2000):
        os.kill(os.getpid(), {int(STACK_SIGNAL)})
        pace.wait(1e-4)
    """.replace("\n    ", "\n")
    path = tmp_path / "stacks"
    ended = subprocess.run([sys.executable, "-c", code, str(path)])
    assert ended.returncode == 0
    text = path.read_text()
    assert text.startswith("Stack (most recent call first):\n  File")
    assert " in work\n" in text, "the other thread is shown, too"


def test_process_asked_for_stacks_while_it_exits_exits_normally(tmp_path: Path) -> None:
    code = f"{HEAD}import os, threading\npace = threading.Event()\n"
    # The thread sends signals until the very end. Without a pause between them, the process would
    # never return from the handler.
    code += f"threading.Thread(target=lambda: [os.kill(os.getpid(), {int(STACK_SIGNAL)})"
    code += " for _ in iter(lambda: pace.wait(1e-4), 1)], daemon=True).start()\n"
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")])
        assert ended.returncode == 0
