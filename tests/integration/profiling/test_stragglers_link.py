"""A rank behind a slow link is found: each rank is in its own network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from taskd.core.manager.watch.stragglers import (
    Accuse,
    Cause,
    PacesReported,
    State,
    Straggler,
    StragglerConfig,
    step,
)
from taskd.model.profiling import Pace
from taskd.runtime.files.profiling_files import read_pace
from tests.integration.profiling.test_profiling_run import until

TAG = f"tk{os.getpid() % 10000}"
RANKS, SLOW = 3, 1

TRAIN = """
    import os, sys, threading
    import torch
    import torch.distributed as dist
    import taskd.torch
    from taskd.model.profiling import EVERYTHING
    from taskd.worker.profiling import profiler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    profiler.of_process().request(EVERYTHING)
    over = torch.zeros(1)
    while not over:
        model(torch.ones(8, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        over.fill_(os.path.exists("stop"))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """A network bridge with one namespace per rank; all of it is removed at the end."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc")
    spaces = [f"{TAG}n{rank}" for rank in range(RANKS)]
    bridge = f"{TAG}br"
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError:
            pytest.skip("this machine has no network bridges")
        ip("link", "set", bridge, "up")
        for rank, space in enumerate(spaces):
            ip("netns", "add", space)
            ip(
                "link",
                "add",
                f"{TAG}v{rank}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            ip("link", "set", f"{TAG}v{rank}", "master", bridge, "up")
            ip("-n", space, "addr", "add", f"10.213.7.{rank + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in spaces:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)


def test_rank_behind_a_slow_link_is_named(names: list[str], tmp_path: Path) -> None:
    shape = ["tc", "-n", names[SLOW], "qdisc", "add", "dev", "eth0", "root", "tbf"]
    limits = ["rate", "80mbit", "burst", "32kbit", "latency", "50ms"]
    subprocess.run([*shape, *limits], check=True)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    processes = []
    for rank, space in enumerate(names):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "10.213.7.1",
            "MASTER_PORT": "29544",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TASKD_PROFILING_DIR": str(tmp_path / "profiling"),
            "TASKD_PROFILING_PROBE": str(tmp_path / f"rank{rank}"),
        }
        command = ["ip", "netns", "exec", space, sys.executable, str(script)]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=env))
    config, state = StragglerConfig(window_s=4.0), State()
    latest: dict[int, Pace] = {}
    found: list[Straggler] = []
    now = 0.0

    def found_one() -> bool:
        nonlocal state, now
        assert all(process.poll() is None for process in processes)
        now += 0.05
        paces = [read_pace(str(tmp_path / f"rank{rank}")) for rank in range(RANKS)]
        news = tuple(p for p in paces if p is not None and latest.get(p.rank) != p)
        latest.update({pace.rank: pace for pace in news})
        if news:
            outcome = step(state, PacesReported(news), now, config)
            state = outcome.state
            found.extend(c.straggler for c in outcome.commands if isinstance(c, Accuse))
        return bool(found)

    try:
        until(found_one, "a straggler is found")
        (tmp_path / "stop").touch()
        assert [process.wait(60) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [(slow.rank, slow.cause) for slow in found] == [(SLOW, Cause.NETWORK)], found
