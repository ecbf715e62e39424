"""Bad input, full disks and wrong clocks: a clear message, the exit code, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from taskd.runtime.address import free_port
from tests.integration.run.run_job import DEADLINE_S, TRAIN, Job, run, script

NOISY = """
    import sys
    for _ in range(3000):
        print("y" * 999)
    print("end", file=sys.stderr)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_rank_that_exits_while_others_wait_fails_the_job(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if os.environ["RANK"] == "0":
            sys.exit(0)
        dist.barrier()
        """,
    )
    ended = run(tmp_path, "--nproc-per-node=2", "--max-restarts=1", path)
    assert ended.code == 1
    assert re.search(r"first rank to fail: rank 1, pid \d+, exit code 1", ended.err)
    assert "Connection closed by peer" in ended.err


def test_logs_that_fill_disk_do_not_stop_training(tmp_path: Path, small_disk: Path) -> None:
    ended = run(tmp_path, f"--log-dir={small_disk}", "--tee=3", script(tmp_path, NOISY))
    assert ended.code == 0, ended.err
    assert "stdout.log: No space left on device" in ended.err
    assert ended.out.count("y" * 999) == 3000, "the console gets all lines"


def test_rank_that_dies_of_full_disk_is_reported_so(tmp_path: Path, small_disk: Path) -> None:
    """Its stdout and stderr are files on the full disk, as with torchrun."""
    words = [f"--log-dir={small_disk}", "--redirects=3", "--max-restarts=1"]
    ended = run(tmp_path, *words, script(tmp_path, NOISY))
    assert ended.code == 1
    assert "the disk is full" in ended.err


def test_full_temporary_folder_does_not_stop_training(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "filling").write_bytes(bytes(1 << 20))
    ended = run(tmp_path, script(tmp_path, "print('trained')"), TMPDIR=str(small_disk))
    assert (ended.code, ended.out) == (0, "[rank 0]: trained\n"), ended.err


def test_taken_manager_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(tmp_path, f"--manager-port={port}", script(tmp_path, ""))
    assert ended.code == 1
    assert f"{port}: Address already in use" in ended.err


def test_launcher_killed_during_start_leaves_nothing_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, script(tmp_path, ""))
    family: list[psutil.Process] = []
    while not any(_name(process) == "taskd:sweeper" for process in family):
        assert job.popen.poll() is None
        family = job.family()
    zygote = next(process for process in family if _name(process) == "taskd:zygote")
    folders = [word.partition("=")[2] for word in zygote.cmdline() if "--remove=" in word]
    assert len(folders) == 2
    job.popen.kill()
    job.popen.communicate()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not alive
    assert not job.left()
    assert not any(map(os.path.exists, folders))


class FarJob(Job):
    under = ("unshare", "--time", "--monotonic", "400000", "--boottime", "400000")


def test_different_clocks_do_not_matter(tmp_path: Path) -> None:
    """The monotonic clock of the second node is days ahead: that machine was booted earlier."""
    if subprocess.run([*FarJob.under, "true"], capture_output=True).returncode != 0:
        pytest.skip("time namespaces are not available here")
    ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
    words = ["--nnodes=2", "--nproc-per-node=1", *ports, "--rdzv-id=clocks"]
    path = script(tmp_path, TRAIN)
    jobs = []
    for node, kind in enumerate((Job, FarJob)):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        jobs.append(kind(folder, *words, f"--node-rank={node}", path, DIE="1.0.1"))
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0], ended
    assert "attempt 1" in ended[0].out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start_stops_everything(tmp_path: Path, signum: int) -> None:
    job = Job(tmp_path, script(tmp_path, "print('too late')"))
    while not any(_name(process) == "taskd:zygote" for process in job.family()):
        assert job.popen.poll() is None
    job.signal(signum)
    ended = job.end()
    assert ended.code != 0
    assert "too late" not in ended.out
    assert "Traceback" not in ended.err, ended.err


def _name(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""
