"""The zygote with real processes: starts, exits, signals, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from taskd.agent.zygote.program import Program
from taskd.agent.zygote.worker_processes import Exit, Process, WorkerProcesses, ZygoteLost

DEADLINE_S = 30.0


class Trial:
    """Worker processes of one program, and what the program has printed."""

    def __init__(self, tmp_path: Path, program: Program, **options: object) -> None:
        self.processes = WorkerProcesses(program, **options)  # type: ignore[arg-type]
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.out = tmp_path / "out"
        self.err = tmp_path / "err"
        self.left: list[psutil.Process] = []

    async def start(self, name: str = "rank0", **env: str) -> Process:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("ab")) for path in (self.out, self.err)]
            return await self.processes.start(
                name, env, files[0].fileno(), files[1].fileno(), self.exits.put_nowait
            )

    async def exited(self) -> Exit:
        return await asyncio.wait_for(self.exits.get(), DEADLINE_S)


def trial(
    tmp_path: Path,
    program: Program,
    scenario: Callable[[Trial], Awaitable[None]],
    **options: object,
) -> Trial:
    made = Trial(tmp_path, program, **options)

    async def run() -> None:
        made.processes.watch()
        try:
            await asyncio.wait_for(scenario(made), DEADLINE_S)
        finally:
            await made.processes.close()

    made.processes.open()
    asyncio.run(run())
    return made


def script(tmp_path: Path, text: str, *arguments: str) -> Program:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return Program("script", str(path), arguments)


def test_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, pickle, sys

        class Thing: ...

        print(sys.argv, sys.path[0], __name__, __file__, os.environ["RANK"], flush=True)
        assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
        assert sys.modules["__main__"].Thing is Thing
        sys.exit(7)
        """,
        "--lr",
        "1",
    )

    async def scenario(it: Trial) -> None:
        await it.start(RANK="3")
        assert (await it.exited()).exit_code == 7

    output = trial(tmp_path, program, scenario).out.read_text()
    path = program.target
    assert output == f"{[path, '--lr', '1']} {tmp_path} __main__ {path} 3\n"


def test_spawn_and_fork_give_same_output(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import atexit, sys, threading
        atexit.register(print, "at exit")
        threading.Thread(target=sys.stdout.write, args=["thread\\n"]).start()
        sys.stdout.write(f"{sys.argv[1:]} {sys.path[0]} {sys.stdin.read() == ''}\\n")
        def fails(): raise ValueError("bad")
        fails()
        """,
        "a b",
    )

    async def scenario(it: Trial) -> None:
        await it.start()
        assert (await it.exited()).exit_code == 1

    texts = []
    for spawn in (False, True):
        folder = tmp_path / str(spawn)
        folder.mkdir()
        it = trial(folder, program, scenario, spawn=spawn)
        texts.append((sorted(it.out.read_text().splitlines()), it.err.read_text()))
    assert texts[0] == texts[1]
    assert "ValueError: bad" in texts[0][1]


def test_module_runs_as_python_m_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "go.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)

    async def scenario(it: Trial) -> None:
        await it.start()
        assert (await it.exited()).exit_code == 0

    it = trial(tmp_path, Program("module", "pack.go", ("x",)), scenario)
    assert it.out.read_text() == "__main__ pack ['x']\n"


def test_killed_worker_is_reported_with_signal(tmp_path: Path) -> None:
    program = script(tmp_path, "import signal; signal.pause()")

    async def scenario(it: Trial) -> None:
        process = await it.start()
        os.kill(process.pid, signal.SIGSEGV)
        exited = await it.exited()
        assert (exited.process, exited.exit_code, exited.signal) == (process, None, signal.SIGSEGV)

    trial(tmp_path, program, scenario)


def test_missing_script_exits_as_with_python(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        await it.start()
        assert (await it.exited()).exit_code == 2

    it = trial(tmp_path, Program("script", str(tmp_path / "no.py")), scenario)
    assert "can't open file" in it.err.read_text()


def test_missing_executable_is_named(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        await it.start()
        assert (await it.exited()).exit_code == 127

    it = trial(tmp_path, Program("exec", "no-such-program"), scenario)
    assert "cannot run no-such-program" in it.err.read_text()


def test_uncaught_exception_writes_error_file(tmp_path: Path) -> None:
    program = script(tmp_path, "def f():\n    raise KeyError('lost')\nf()\n")

    async def scenario(it: Trial) -> None:
        await it.start(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
        await it.exited()

    trial(tmp_path, program, scenario)
    report = (tmp_path / "error.json").read_text()
    assert "KeyError: 'lost'" in report
    assert "program.py" not in report


def test_children_of_worker_die_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = script(
        tmp_path,
        """
        import signal, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open(sys.argv[1], "w").write(str(child.pid))
        signal.pause()
        """,
        str(fifo),
    )

    async def scenario(it: Trial) -> None:
        process = await it.start()
        child = psutil.Process(int(await asyncio.to_thread(fifo.read_text)))
        os.kill(process.pid, signal.SIGKILL)
        await it.exited()
        await asyncio.to_thread(child.wait, DEADLINE_S)

    trial(tmp_path, program, scenario)


def test_workers_outlive_their_zygote_and_the_next_one_starts_more(tmp_path: Path) -> None:
    program = script(tmp_path, "import signal; signal.pause()")

    async def scenario(it: Trial) -> None:
        old = [await it.start(f"rank{rank}") for rank in range(3)]
        for number in range(2):
            newest = old[-1]
            zygote = psutil.Process(newest.pid).ppid()
            os.kill(zygote, signal.SIGKILL)
            again = await it.start(f"rank{3 + number}")
            assert psutil.Process(again.pid).ppid() != zygote
            assert it.exits.empty()
            assert {psutil.Process(one.pid).ppid() for one in old} == {os.getpid()}
            old.append(again)
        os.kill(old[0].pid, signal.SIGTERM)
        assert await it.exited() == Exit(old[0], None, signal.SIGTERM)
        it.processes.kill(old[1])
        assert await it.exited() == Exit(old[1], None, signal.SIGKILL)
        it.left = [psutil.Process(one.pid) for one in old[2:]]

    assert not psutil.wait_procs(trial(tmp_path, program, scenario).left, timeout=0)[1]


def test_start_that_dies_with_the_zygote_leaves_no_process(tmp_path: Path) -> None:
    program = script(tmp_path, "import signal; signal.pause()")

    async def scenario(it: Trial) -> None:
        known = {(await it.start()).pid}
        for number in range(5):
            zygote = it.processes._popen
            assert zygote is not None
            starting = asyncio.create_task(it.start())
            for _ in range(number):
                await asyncio.sleep(0)
            zygote.kill()
            with suppress(ZygoteLost):
                known.add((await starting).pid)
            known.add((await it.start()).pid)
        workers = {
            process.pid
            for process in psutil.Process().children(recursive=True)
            if process.name().startswith("taskd:rank")
        }
        assert workers == known

    trial(tmp_path, program, scenario)


def test_module_that_starts_threads_is_not_preloaded(tmp_path: Path) -> None:
    code = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded.py").write_text(code)

    async def scenario(it: Trial) -> None:
        ready = await it.processes.ready()
        assert "started a thread" in ready.failed["threaded"]

    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    trial(tmp_path, script(tmp_path, ""), scenario, preload=("threaded",), env=env)


def test_zygote_that_keeps_dying_is_not_restarted_forever(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    program = script(tmp_path, "")

    async def scenario(it: Trial) -> None:
        lost = asyncio.Event()
        it.processes.on_lost = lost.set
        await lost.wait()
        with pytest.raises(ZygoteLost):
            await it.start()

    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    trial(tmp_path, program, scenario, preload=("deadly",), env=env)


def test_nothing_outlives_launcher(tmp_path: Path) -> None:
    """The worker has a child in another session: the zygote still finds and kills it."""
    program = script(
        tmp_path,
        """
        import os, signal
        print(os.getpid(), flush=True)
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
        signal.pause()
        """,
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_LAUNCHER), str(tmp_path), program.target],
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    zygote = psutil.Process(int(launcher.stdout.readline()))
    launcher.stdout.readline()
    others = zygote.children(recursive=True)
    assert len(others) == 2
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _, alive = psutil.wait_procs([zygote, *others], timeout=DEADLINE_S)
    assert not alive
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "importing"])
def test_worker_of_a_dead_zygote_does_not_outlive_the_launcher(tmp_path: Path, ready: bool) -> None:
    program = script(tmp_path, "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_LAUNCHER), str(tmp_path), program.target, "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    zygote = psutil.Process(int(launcher.stdout.readline()))
    launcher.stdout.readline()
    [worker] = zygote.children()
    zygote.kill()
    psutil.wait_procs([zygote], timeout=DEADLINE_S)
    assert launcher.stdout.readline() == "another\n"
    if ready:
        assert launcher.stdout.readline() == "ready\n"
    assert worker.is_running()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert not psutil.wait_procs([worker], timeout=DEADLINE_S)[1]


_LAUNCHER = """
    import asyncio, os, sys
    from pathlib import Path
    from taskd.agent.zygote.worker_processes import WorkerProcesses
    from taskd.agent.zygote.program import Program

    folder, script = Path(sys.argv[1]), sys.argv[2]
    (folder / "run").mkdir()
    read, write = os.pipe()

    async def main():
        processes = WorkerProcesses(Program("script", script), remove=(str(folder / "run"),))
        processes.open()
        processes.watch()
        await processes.start("rank0", {}, write, 2, print)
        printed = b""
        while printed.count(b"\\n") < int((*sys.argv, "2")[3]):
            printed += await asyncio.to_thread(os.read, read, 100)
        print(processes._popen.pid, flush=True)
        print("started", flush=True)
        first = processes._popen
        while processes._popen is first:
            await asyncio.sleep(0.001)
        print("another", flush=True)
        await processes.ready()
        print("ready", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_just_forked_worker_can_be_killed(tmp_path: Path, signum: int) -> None:
    """Right after the fork, a child is still in its parent's group and ignores SIGTERM."""

    async def scenario(trial: Trial) -> None:
        for _ in range(100):
            child = await trial.start()
            if signum == signal.SIGKILL:
                trial.processes.kill(child)
            else:
                trial.processes.send_signal(child, signum)
            assert await trial.exited() == Exit(child, None, signum)

    trial(tmp_path, script(tmp_path, "import signal; signal.pause()"), scenario)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "from threading import *; Thread(target=Event().wait, daemon=True).start()",
            "it has started a thread",
        ),
        ("import torch; torch.cuda.is_initialized = lambda: True", "it has initialized CUDA"),
    ],
)
def test_module_that_makes_forking_unsafe_is_named(
    tmp_path: Path, text: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harmful.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario(trial: Trial) -> None:
        ready = await trial.processes.ready()
        assert ready.modules == ["json"]
        because = f"{problem}, so it cannot be forked: use --start-method spawn"
        assert ready.failed == {"harmful": because}

    program = script(tmp_path, "")
    trial(tmp_path, program, scenario, preload=("json", "harmful"))


def test_zygote_whose_agent_has_died_does_not_begin_to_import(tmp_path: Path) -> None:
    """The agent may die before the zygote has asked the kernel to die with it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        code = "from taskd.agent.zygote import zygote; zygote.main()"
        words = [f"--fd={far.fileno()}", f"--parent={dead.pid}", "--kind=script"]
        process = subprocess.run(
            [sys.executable, "-c", code, *words, f"--remove={folder}", "script.py"],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
    assert (process.returncode, process.stdout) == (0, b""), process.stderr
    assert not folder.exists()
