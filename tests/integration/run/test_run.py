"""`taskd run` with real processes: healthy jobs, bad input, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from taskd.errors import DO_NOT_REPLACE
from tests.integration.run.run_job import DEADLINE_S, TRAIN, Job, run, script


def test_healthy_job_succeeds(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN))
    assert ended.code == 0, ended.err
    assert ended.out.startswith("[rank 0]: weights ")
    assert "done after" in ended.err
    assert "taskd status" in ended.err


def test_environment_is_that_of_torchrun(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import json, os
        names = (
            "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
            "ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT "
            "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE "
            "OMP_NUM_THREADS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_SIGNALS_TO_HANDLE"
        )
        print(json.dumps({name: os.environ[name] for name in names.split()}))
        assert os.environ["TORCHELASTIC_ERROR_FILE"]
        """,
    )
    ended = run(tmp_path, "--nproc-per-node=2", "--rdzv-id=myjob", "--max-restarts=3", path)
    assert ended.code == 0, ended.err
    printed = [json.loads(line.partition(": ")[2]) for line in ended.out.splitlines()]
    assert sorted(each["RANK"] for each in printed) == ["0", "1"]
    assert printed[0] == {
        "RANK": printed[0]["RANK"],
        "LOCAL_RANK": printed[0]["RANK"],
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": printed[0]["RANK"],
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "myjob",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


def test_job_restarts_after_killed_rank_with_same_result(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    undisturbed = run(tmp_path, "--nproc-per-node=2", path)
    disturbed = run(tmp_path, "--nproc-per-node=2", path, DIE="1.0.1")
    assert disturbed.code == 0, disturbed.err
    assert disturbed.out.count("weights") == 1
    (line,) = [line for line in disturbed.out.splitlines() if "weights" in line]
    assert line == undisturbed.out.replace("attempt 0", "attempt 1").strip()
    assert "1 fault: " in disturbed.err
    assert "incident 1: rank 1 (" in disturbed.err


def test_job_that_always_fails_ends_with_reason(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, "raise OSError('no data')"))
    assert ended.code == 1
    assert "| OSError: no data" in ended.err


def test_restart_budget_is_respected(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True); "
        "os.kill(os.getpid(), 9)",
    )
    ended = run(tmp_path, "--max-restarts=1", path)
    assert ended.code == 1
    attempts = [line for line in ended.out.splitlines() if "attempt" in line]
    assert attempts == ["[rank 0]: attempt 0", "[rank 0]: attempt 1"]


def test_one_rank_may_finish_early(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys, pathlib
        gone = pathlib.Path("gone")
        if os.environ["RANK"] == "0":
            gone.touch()
            sys.exit(0)
        import signal
        signal.sigtimedwait([], 0.5)
        print("the other one", gone.exists())
        """,
    )
    ended = run(tmp_path, "--nproc-per-node=2", path)
    assert (ended.code, ended.out) == (0, "[rank 1]: the other one True\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.py"], "no such script: 'no.py'"),
        (["--nproc-per-node=many", "x"], "--nproc-per-node"),
        (["--nproc-per-node=0", "x"], "--nproc-per-node"),
        (["--nnodes=2:1", "x"], "--nnodes"),
        (["--node-rank=3", "x"], "--node-rank 3"),
        (["--strategies=pray", "x"], "unknown value pray"),
        (["--redirects=7", "x"], "--redirects"),
        (["--no-python", "-m", "x"], "exclude each other"),
        (["--signals-to-handle=SIGNONE", "x"], "SIGNONE"),
        (["--max-restarts=-1", "x"], "--max-restarts"),
        (["--preload=no_such_module", "-m", "this"], "no_such_module"),
    ],
)
def test_wrong_command_line_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    ended = run(tmp_path, *words)
    # Whether a module can be imported is found out later, when processes start.
    assert ended.code == (1 if message == "no_such_module" else DO_NOT_REPLACE)
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(tmp_path, f"--master-port={port}", script(tmp_path, ""))
    assert ended.code == 1
    assert f"{port}: Address already in use" in ended.err


def test_program_that_is_not_python_can_be_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "--no-python", "--nproc-per-node=2", "/bin/sh", "-c", "echo I am $RANK")
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[rank 0]: I am 0", "[rank 1]: I am 1"]


def test_spawned_workers_train_and_restart(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    ended = run(tmp_path, "--start-method=spawn", "--nproc-per-node=2", path, DIE="0.0.1")
    assert ended.code == 0, ended.err
    assert "attempt 1" in ended.out


def test_streams_go_where_torchrun_sends_them(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        print("out", os.environ["RANK"]); print("err", os.environ["RANK"], file=sys.stderr)
        """,
    )
    logs = tmp_path / "logs"
    words = ["--log-dir", str(logs), "--redirects=1:3", "--tee=0:1", "--nproc-per-node=2"]
    ended = run(tmp_path, *words, path)
    assert ended.code == 0, ended.err
    assert ended.out == "[default0]:out 0\n"
    assert "[rank 0]: err 0" in ended.err
    assert "err 1" not in ended.err
    (folder,) = logs.iterdir()
    files = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
        "attempt_0/1/stderr.log": "err 1\n",
    }


def test_large_output_arrives_completely(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        line = "x" * 999 + "\\n"
        for _ in range(50_000):
            sys.stdout.write(line)
        """,
    )
    ended = run(tmp_path, "--nproc-per-node=2", path)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) == 100_000
    assert {len(line) for line in lines} == {999 + len("[rank 0]: ")}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_everything(tmp_path: Path, signum: int) -> None:
    path = script(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    job = Job(tmp_path, "--nproc-per-node=2", path)
    job.wait_for("up")
    job.wait_for("up")
    job.signal(signum)
    ended = job.end()
    assert ended.code == 1
    assert f"stopped by {signal.Signals(signum).name}" in ended.err


def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
        print("up", flush=True)
        while True:
            signal.pause()
        """,
    )
    job = Job(tmp_path, path)
    job.wait_for("up")
    job.signal()
    job.wait_for("no")
    job.signal()
    assert job.end().code == 1


def test_worker_that_ignores_sigterm_is_killed_after_timeout(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        signal.pause()
        """,
    )
    job = Job(tmp_path, "--shutdown-timeout=1", path)
    job.wait_for("up")
    job.signal()
    assert job.end().code == 1


def test_nothing_outlives_killed_launcher(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys
        if os.fork() == 0:
            os.setsid()
        print("up", flush=True)
        signal.pause()
        """,
    )
    job = Job(tmp_path, "--nproc-per-node=2", path)
    for _ in range(4):
        job.wait_for("up")
    family = job.family()
    assert len(family) >= 7  # zygote, manager, store, two workers and their children
    job.look()
    assert job.left(), "there are files to remove"
    assert len(job.memory) == 1
    assert len(job.listening()) >= 3  # store, manager, proxy
    job.popen.kill()
    job.popen.communicate()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not alive
    assert not job.left()
    assert not job.listening()


def test_nothing_is_left_after_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    job = Job(tmp_path, script(tmp_path, "print('up', flush=True); open('go').read()"))
    job.wait_for("up")
    job.look()
    assert len(job.memory) == 1
    assert len(job.listening()) >= 3
    (tmp_path / "go").write_text("")
    assert job.end().code == 0
    assert not job.left()
    assert not job.listening()


def test_training_continues_while_manager_is_restarted(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import pathlib, os
        print("up", flush=True)
        os.mkfifo("go") if not os.path.exists("go") else None
        open("go").read()
        """,
    )
    os.mkfifo(tmp_path / "go")
    job = Job(tmp_path, path)
    job.wait_for("up")
    first = job.manager()
    first.kill()
    first.wait(DEADLINE_S)
    (tmp_path / "go").write_text("")
    ended = job.end()
    assert ended.code == 0, ended.err
    assert "manager exited: " in ended.err


def test_closed_console_does_not_stop_training(tmp_path: Path) -> None:
    path = script(tmp_path, "print('x' * 100_000)\nopen('done', 'w').close()\n")
    job = Job(tmp_path, path)
    assert job.popen.stdout is not None
    job.popen.stdout.close()
    assert job.popen.stderr is not None
    job.popen.stderr.read()
    job.popen.stderr.close()
    job.popen.wait(DEADLINE_S)
    assert (tmp_path / "done").exists()
    assert job.popen.returncode == 0
