"""A decision of clusterd with three members of etcd in memory, against its journal alone.

Both servers run all the time and take turns, so that what else the machine does costs both alike.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from taskd.runtime.address import free_port
from taskd.runtime.clock import monotonic
from tests import ROOT
from tests.bench.clusterd import in_turn, server
from tests.bench.rows import Row
from tests.integration.etcd.member_node import MemberNode, cluster

MEMBERS = 3
ROUNDS = 100


@contextmanager
def server_on_etcd(nodes: list[MemberNode]) -> Iterator[str]:
    settings = nodes[0].settings
    tls = {"CA": settings.ca, "CRT": settings.crt, "KEY": settings.key}
    addresses = ",".join(node.facts["client"] for node in nodes)
    command = [sys.executable, "-m", "taskd", "clusterd", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--etcd", addresses],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": "src"}
        | {f"TASKD_ETCD_{name}": path for name, path in tls.items()},
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().split()[-1]}"
    finally:
        process.terminate()
        process.wait(30)


def measure(rounds: int = ROUNDS) -> list[Row]:
    with TemporaryDirectory(dir=ROOT, prefix=".bench-") as name:
        directory = Path(name)
        began = monotonic()
        with cluster(f"127.0.0.1:{free_port()}", MEMBERS) as nodes:
            ready = monotonic()
            imported = max(node.facts["began"] for node in nodes)
            with server(directory / "journal") as (_, plain), server_on_etcd(nodes) as address:
                alone, shared = asyncio.run(in_turn([plain, address], rounds))
            etcds = [psutil.Process(node.popen.pid).children()[0] for node in nodes]
            memory = max(etcd.memory_info().rss for etcd in etcds) / 2**20
            data = max(_data_bytes(node) for node in nodes) / 2**20
    ours, theirs = statistics.median(shared), statistics.median(alone)
    return [
        Row(
            "one decision with three members of etcd: report → stop signal",
            f"{ours * 1e3:.2f} ms (median of {len(shared)})",
            f"journal alone {theirs * 1e3:.2f} ms; target: 3 ms more",
            (ours - theirs) / 3e-3,
            1.0,
        ),
        Row(
            "three members, from the start of three launchers to three votes",
            f"{ready - began:.1f} s",
            f"{ready - imported:.1f} s after all three have imported their modules",
        ),
        Row(
            "memory per member: process and data",
            f"{memory:.0f} MiB and {data:.0f} MiB",
            "",
        ),
    ]


def _data_bytes(node: MemberNode) -> int:
    folder = Path(node.facts["ca"]).parent / "data"
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    for row in measure():
        sys.stdout.write(f"{row}\n")
