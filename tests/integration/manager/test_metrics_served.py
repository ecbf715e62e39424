"""What Prometheus gets from real processes: a clusterd after a round, and a job."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskd.wire._pb import control_pb2
from tests.integration.clusterd.client import connected
from tests.integration.operations.test_operations import running

SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
LISTENING = re.compile(r"clusterd listens on port (\d+)")
METRICS = re.compile(r"metrics on port (\d+)")

Samples = dict[tuple[str, frozenset[str]], float]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found: Samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
            found[name, frozenset((labels or "").split(","))] = float(value)
    return found


def of(samples: Samples, name: str, *labels: str) -> float:
    """The sample of this name whose labels include these."""
    (value,) = (v for (n, found), v in samples.items() if n == name and set(labels) <= found)
    return value


@contextmanager
def clusterd(journal: Path) -> Iterator[tuple[int, int]]:
    """The ports of its services and of its metrics."""
    words = ["clusterd", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    words += ["--journal", str(journal)]
    process = subprocess.Popen(
        [sys.executable, "-m", "taskd", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        output = ""
        while not (LISTENING.search(output) and METRICS.search(output)):
            line = process.stderr.readline()
            assert line, output
            output += line
        ports = [int(pattern.search(output)[1]) for pattern in (LISTENING, METRICS)]  # type: ignore[index]
        yield ports[0], ports[1]
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()


def test_clusterd_serves_metrics_of_all_its_jobs(tmp_path: Path) -> None:
    with clusterd(tmp_path / "journal") as (port, metrics):
        assert of(scrape(metrics), "taskd_clusterd_jobs") == 0
        samples = asyncio.run(a_round(port, metrics))
    assert of(samples, "taskd_clusterd_jobs") == 1
    assert of(samples, "taskd_clusterd_job_state", 'job="job"', 'state="Idle"') == 1
    assert of(samples, "taskd_clusterd_incident", 'job="job"') == 1
    assert of(samples, "taskd_clusterd_decisions_total", 'job="job"') >= 2
    assert of(samples, "taskd_clusterd_subscribed", 'job="job"') == 1
    assert of(samples, "taskd_clusterd_step", 'job="job"') == 7
    assert of(samples, "taskd_clusterd_steps_per_second", 'job="job"') == 2.5
    assert of(samples, "taskd_clusterd_world_size", 'job="job"') == 4
    assert of(samples, "taskd_clusterd_ranks", 'job="job"', 'phase="training"') == 3
    assert of(samples, "taskd_clusterd_straggler", 'rank="2"', 'cause="compute"') == 1
    assert of(samples, "taskd_clusterd_operation_running", 'job="job"') == 1
    assert of(samples, "taskd_clusterd_recent_rounds", 'strategy="recover-in-place"') == 1
    assert of(samples, "taskd_clusterd_last_round_seconds", 'job="job"') >= 0


async def a_round(port: int, metrics: int) -> Samples:
    """A rank dies and is replaced; the metrics after that."""
    async with connected(f"127.0.0.1:{port}") as client:
        await client.declare("recover-in-place")
        await client.join()
        signals = await client.subscribe()
        progress = control_pb2.JobProgress(
            job="job",
            step=7,
            world=4,
            steps_per_s=2.5,
            operation="stress test",
            ranks=[control_pb2.RankStatus(rank=rank, phase="training") for rank in range(3)],
            stragglers=[control_pb2.Straggler(rank=2, cause="compute")],
        )
        assert await client.code("PublishProgress", progress) == 0
        assert await client.fault(1) == 0
        stop = await signals.next("stopTrain")
        assert await client.stopped(stop.uuid) == 0
        await signals.next("globalFault")
        assert await client.offer("recover", uuid=stop.uuid) == 0
        order = await signals.next("changeStrategy")
        assert await client.result("recover", uuid=order.uuid) == 0
        return await asyncio.to_thread(scrape, metrics)


def test_manager_serves_metrics_of_its_job() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with running("--metrics", f"127.0.0.1:{port}") as job:
        job.at_step(10)
        first = scrape(port)
        job.at_step(30)
        second = scrape(port)
    label = f'job="{job.job}"'
    assert of(second, "taskd_step", label) > of(first, "taskd_step", label) > 0
    assert of(second, "taskd_world_size", label) == 4
    assert of(second, "taskd_ranks", label, 'phase="training"') == 4
    assert 0 < of(second, "taskd_goodput_ratio", label) <= 1
    assert of(second, "taskd_operation_running", label) == 0
