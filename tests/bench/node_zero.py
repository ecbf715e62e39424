"""The loss of node 0, until the next step: its launcher killed, or its cable cut."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from taskd.runtime.clock import monotonic
from tests.bench.rows import Row
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.namespaces import star
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_node_zero import Cluster, lose

TRIALS = 3
KILLED_S, SILENT_S = 2.5, 5.0
NOTES = """
Three nodes with two ranks each and a spare node, DDP over gloo, one etcd 3.4, all on one machine.
Killed: SIGKILL to the launcher of node 0 and all its processes; its ports refuse, so the lease is
revoked. Silent: the cable of node 0 is cut, and its lease must end. Detection and election end when
another manager leads. Hand-over ends when it knows what is lost. Repair is the incident itself, as
the summary of the job has it. The whole ends with the first step that a surviving rank completes.
"""
TRAIN = """
    import sys, time

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    job = taskd.init()
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(150):
        for attempt in step:
            with attempt:
                model(torch.ones(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        print(f"step {int(step)} at {time.monotonic()}", flush=True)
        time.sleep(0.05)
"""


class Reader:
    """Reads one stream of a launcher to its end."""

    def __init__(self, stream: object) -> None:
        self.lines: list[tuple[float, str]] = []
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:  # type: ignore[attr-defined]
            self.lines.append((monotonic(), line))

    def text(self) -> str:
        self._thread.join()
        return "".join(line for _, line in self.lines)


def measure() -> list[Row]:
    killed = [_trial(_killed) for _ in range(TRIALS)]
    rows = _rows("node 0 is killed, until the next step", killed, KILLED_S)
    if namespaces.possible():
        silent = [_trial(_silent) for _ in range(TRIALS)]
        rows += _rows("node 0 is silent, until the next step", silent, SILENT_S)
    return rows


Parts = tuple[float, float, float]
"""Detection and election, hand-over, repair."""


def _rows(what: str, trials: list[Parts], target_s: float) -> list[Row]:
    leads, handed, repaired = (median(part) for part in zip(*trials, strict=True))
    whole = median(map(sum, trials))
    parts = f"election {leads:.2f} s, hand-over {handed:.2f} s, repair {repaired:.2f} s"
    ours = f"{whole:.2f} s (median of {len(trials)})"
    return [Row(f"{what}, in seconds", ours, parts, whole, target_s)]


def _killed(folder: Path, stack: ExitStack) -> tuple[Cluster, Callable[[Job], None]]:
    server = stack.enter_context(running(folder / "etcd"))
    return Cluster(folder, server, "--strategies=recover", script(folder, TRAIN)), lose


def _silent(folder: Path, stack: ExitStack) -> tuple[Cluster, Callable[[Job], None]]:
    machines = stack.enter_context(star(4))
    under = tuple(machines.inside(machines.hub))
    server = EtcdServer(folder / "etcd", client=f"{machines.hub_address}:2379", under=under)
    server.start()
    stack.callback(server.kill)
    words = ("--strategies=recover", script(folder, TRAIN))
    return Cluster(folder, server, *words, machines=machines), lambda job: machines.cut(0)


def _trial(
    prepare: Callable[[Path, ExitStack], tuple[Cluster, Callable[[Job], None]]],
) -> Parts:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster, disturb = prepare(Path(folder), stack)
        zero, *others = [cluster.start(node) for node in range(4)]
        stack.callback(lose, zero)
        others[0].wait_for("step 30 at")
        readers = [
            Reader(stream) for job in others for stream in (job.popen.stdout, job.popen.stderr)
        ]
        began = monotonic()
        disturb(zero)
        codes = [job.popen.wait(300) for job in others]
        texts = [reader.text() for reader in readers]
    assert codes == [0, 0, 0], texts
    leads = min(
        at for reader in readers for at, line in reader.lines if "leads the job since" in line
    )
    steps = sorted(map(float, re.findall(r"step \d+ at ([\d.]+)", "".join(texts))))
    # The first step that ends after another manager leads: before that no rank can continue.
    resumed = next(at for at in steps if at > leads)
    repair = re.search(r"-> recover: recovered in (\d+) ms", "".join(texts))
    assert repair is not None, texts
    repair_s = int(repair[1]) / 1000
    return leads - began, resumed - leads - repair_s, repair_s
