"""A silent node: reported when its cable is cut, not reported when it is only slow.

The two nodes are network namespaces on one machine, and load on that machine must not matter.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration import namespaces
from tests.integration.namespaces import Namespaces, two_machines
from tests.integration.run.run_job import training

pytestmark = pytest.mark.skipif(
    not namespaces.possible(), reason="needs root and network namespaces"
)

WAIT = ("--nproc-per-node=1", "--no-python", "sh", "-c", "echo up; exec sleep 1000")
ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}
KNOWN_BEATS = 6


class Node:
    """`taskd run` of one node, in its own namespace."""

    def __init__(self, spaces: Namespaces, node: int, folder: Path, words: tuple[str, ...]) -> None:
        namespace = spaces.b if node else spaces.a
        first = spaces.address(spaces.a, 0)
        common = ["--nnodes=2", f"--master-addr={first}", "--master-port=29500"]
        ours = [f"--node-rank={node}", f"--job-id=silent{os.getpid()}"]
        command = [sys.executable, "-m", "taskd", "run", *common, *ours, *words]
        # `ip netns exec` replaces itself by the command, so the pid is the launcher's.
        self.popen = subprocess.Popen(
            spaces.inside(namespace, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "TMPDIR": str(folder),
                "TASKD_LOG_LEVEL": "WARNING",
                "TASKD_TOKEN": "s",
                **ETH0,
            },
        )

    def read(self, pattern: str, stream: str = "stderr") -> re.Match[str]:
        """The first line that matches."""
        lines = getattr(self.popen, stream)
        seen = []
        for line in lines:
            seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in {seen}")

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@contextmanager
def job(folder: Path, *words: str) -> Iterator[tuple[Namespaces, Node, Node]]:
    with ExitStack() as stack:
        spaces = stack.enter_context(two_machines())
        nodes = [Node(spaces, node, folder, words) for node in (0, 1)]
        for node in nodes:
            stack.callback(node.close)
        yield spaces, nodes[0], nodes[1]


def beats(spaces: Namespaces, count: int) -> None:
    """Wait for so many heartbeats: by then, many packets have passed through the cable."""
    capture = [
        *spaces.inside(spaces.a, sys.executable, "-c"),
        f"""
import socket
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
for _ in range({30 * count}):
    wire.recv(2048)
""",
    ]
    subprocess.run(capture, check=True, timeout=60)


def test_node_behind_cut_cable_is_reported_silent(tmp_path: Path) -> None:
    with job(tmp_path, *WAIT) as (spaces, first, second):
        first.read("up", "stdout")
        second.read("up", "stdout")
        beats(spaces, KNOWN_BEATS)
        spaces.cut(0)
        report = first.read(r"silent: no heartbeat from node (\d) for [\d.]+ s .* and (.*)")
        assert report[1] == "1"
        assert "its machine has acknowledged nothing" in report[2]


def test_stopped_agent_is_reported_silent_although_its_machine_answers(tmp_path: Path) -> None:
    with job(tmp_path, *WAIT) as (spaces, first, second):
        first.read("up", "stdout")
        second.read("up", "stdout")
        beats(spaces, KNOWN_BEATS)
        second.popen.send_signal(signal.SIGSTOP)
        assert "its machine is alive" in first.read(r"silent: no heartbeat from node 1 .*")[0]


def test_loaded_machine_is_not_reported_silent(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 1.5: sum(range(10000))"
    words = ("--nproc-per-node=6", "--no-python", sys.executable, "-c", burn)
    with job(tmp_path, *words) as (_, first, second):
        ended = [node.popen.communicate(timeout=120) for node in (first, second)]
        assert [node.popen.returncode for node in (first, second)] == [0, 0], ended
        assert "silent: " not in "".join(err for _, err in ended)


def test_node_that_was_cut_off_for_a_second_trains_on(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc-per-node=1", training(tmp_path, 60)) as (spaces, first, second):
        first.read("step 5 ", "stdout")
        spaces.cut(0)
        first.read("silent: no heartbeat from node 1")
        spaces.join(0)
        first.read("node 1: sends heartbeats again")
        first.read("step 59 with 2 ranks", "stdout")
        ended = [node.popen.communicate(timeout=120) for node in (first, second)]
        assert [node.popen.returncode for node in (first, second)] == [0, 0], ended


def test_loss_of_the_first_node_is_reported_on_the_others(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc-per-node=1", training(tmp_path, 60)) as (_, first, second):
        second.read("step 5 ", "stdout")
        first.popen.kill()
        report = second.read(r"the job's manager at (\S+) is unreachable, and the ranks wait: (.*)")
        assert "start the launcher there again within 120 s" in report[2]
