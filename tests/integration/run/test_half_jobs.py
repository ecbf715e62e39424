"""A network that falls apart: at most one part of the job trains, and it is whole afterwards.

Each node is a network namespace; etcd is the job's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from taskd.runtime.clock import wall
from taskd.runtime.files.private_files import make_private, user_folder
from taskd.runtime.retry import Tries, every
from taskd.wire.json_reading import loads
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import binary
from tests.integration.etcd.member_node import MemberNode
from tests.integration.run.run_job import training
from tests.integration.switched_machines import Machines, machines

pytestmark = [
    pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces"),
    pytest.mark.timeout(240),
]


class Launcher:
    """`taskd run` on one machine; its output is in files, so that it never waits for the test.

    A launcher that is started again in the same folder is one on the same machine.
    """

    def __init__(
        self, spaces: Machines, node: int, folder: Path, *words: str, etcd: str = "own"
    ) -> None:
        self.out, self.err = folder / f"out{node}", folder / f"err{node}"
        self.files = folder / f"files{node}"
        """What processes leave for each other on one machine: no other machine sees it."""
        self.files.mkdir(mode=0o700, exist_ok=True)
        shared = make_private(user_folder())
        bind = ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {shared} && exec "$@"']
        address = [f"--master-addr={spaces.address(0)}", "--master-port=29500"]
        job = [f"--job-id=half{os.getpid()}", "--nproc-per-node=1"]
        job += [f"--etcd={etcd}"] if etcd else []
        taskd = [sys.executable, "-m", "taskd", "run", *address, *job, f"--node-rank={node}"]
        environment = {"TMPDIR": str(folder), "TASKD_TOKEN": "s", "GLOO_SOCKET_IFNAME": "eth0"}
        self.started_at = wall()
        with self.out.open("a") as out, self.err.open("a") as err:
            self.popen = subprocess.Popen(
                [*spaces.inside(node), *bind, str(self.files), *taskd, *words],
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, **environment},
            )

    def wait_for(self, pattern: str, *, err: bool = False, after: int = 0) -> None:
        """Until a line matches. The test's own time limit is the limit."""
        path = self.err if err else self.out
        command = [
            "tail",
            f"--bytes=+{after + 1}",
            "--follow",
            f"--pid={self.popen.pid}",
            str(path),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            for line in tail.stdout:
                if re.search(pattern, line):
                    tail.kill()
                    return
        raise AssertionError(f"no {pattern!r}: {self.out.read_text()} {self.err.read_text()}")

    def size(self) -> int:
        return self.out.stat().st_size

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def job(folder: Path, nodes: int, *words: str) -> Iterator[tuple[Machines, list[Launcher]]]:
    binary()
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(nodes))
        launchers = []
        for node in range(nodes):
            launchers.append(Launcher(spaces, node, folder, f"--nnodes={nodes}", *words))
            stack.callback(launchers[-1].close)
        yield spaces, launchers


def test_members_without_a_majority_wait_and_come_back() -> None:
    binary()
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(3))
        nodes = []
        for order in range(3):
            node = MemberNode(f"{spaces.address(0)}:9603", order, under=spaces.inside(order))
            stack.callback(node.close)
            nodes.append(node)
        for node in nodes:
            node.wait_for_voters(0, 1, 2)
        spaces.cut(0)
        nodes[0].wait(lambda node: any("no majority" in text for text in node.said))
        spaces.join(0)
        nodes[0].wait(lambda node: any("has a majority again" in text for text in node.said))
        nodes[0].wait_for_voters(0, 1, 2)


def test_minority_with_node_zero_never_trains_alone(tmp_path: Path) -> None:
    path = training(tmp_path, 10_000)
    words = ("--strategies=retry,recover-in-place,elastic-training", path)
    with job(tmp_path, 3, *words) as (spaces, (zero, one, two)):
        for launcher in (zero, one, two):
            launcher.wait_for("with 3 ranks")
        wait_for_voters(one, two)
        before = [launcher.size() for launcher in (zero, one, two)]
        spaces.cut(0)
        one.wait_for("with 2 ranks", after=before[1])
        two.wait_for("with 2 ranks", after=before[2])
        assert "with 1 ranks" not in zero.out.read_text()
        assert "with 2 ranks" not in zero.out.read_text()
        spaces.join(0)
        one.wait_for("with 3 ranks", after=before[1])
        zero.wait_for("with 3 ranks", after=before[0])
        assert "with 1 ranks" not in zero.out.read_text()


def voters(launcher: Launcher) -> int:
    """As its machine knows them."""
    saved = [loads(path.read_text()) for path in launcher.files.glob("etcd-*.json")]
    return len(saved[0]) if saved else 0


def wait_for_voters(*launchers: Launcher) -> None:
    """Until the job has a majority without any one of its three nodes."""
    for _ in Tries(every(0.2)):
        if all(voters(launcher) == 3 for launcher in launchers):
            break


def test_node_that_cannot_reach_the_port_of_etcd_keeps_no_job_from_running(tmp_path: Path) -> None:
    binary()
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(3))
        spaces.cut_port(1, 9603)
        launchers = []
        for node in range(3):
            words = ("--nnodes=3", "--no-python", "true")
            launchers.append(Launcher(spaces, node, tmp_path, *words, etcd=""))
            stack.callback(launchers[-1].close)
        ended = [launcher.popen.wait() for launcher in launchers]
        said = launchers[0].err.read_text()
        assert ended == [0, 0, 0], said
        assert "The job starts no etcd: node 1 cannot use it: it reaches 10.86.0.1:9601" in said


@pytest.mark.timeout(400)
@pytest.mark.parametrize("has", ["etcd", "no-such-etcd"])
def test_three_nodes_need_no_option_to_survive_node_zero_and_to_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    """Another machine takes its place, and knows nothing of the job."""
    binary()
    path = training(tmp_path, 100_000)
    words = ("--nnodes=3", "--strategies=retry,recover-in-place,elastic-training", path)
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(3))

        def start(node: int) -> Launcher:
            launcher = Launcher(spaces, node, tmp_path, *words, etcd="")
            stack.callback(launcher.close)
            return launcher

        zero, one, two = (start(node) for node in range(3))
        for launcher in (zero, one, two):
            launcher.wait_for("with 3 ranks")
        wait_for_voters(one, two)
        zero.close()
        for launcher in (one, two):
            launcher.wait_for("with 2 ranks")
        shutil.rmtree(zero.files)
        monkeypatch.setenv("TASKD_ETCD_MEMBER_BINARY", has)
        before, said = zero.size(), zero.err.stat().st_size
        start(0).wait_for("with 3 ranks", after=before)
        again = zero.err.read_bytes()[said:].decode()
        assert ("The job starts no etcd: node 0" in again) == (has != "etcd"), again
        assert "leads the job since epoch 2" in one.err.read_text() + two.err.read_text()


def test_two_nodes_alone_wait_after_a_silent_loss_and_continue_on_proof_of_death(
    tmp_path: Path,
) -> None:
    path = training(tmp_path, 10_000)
    words = ("--strategies=retry,recover-in-place,elastic-training", path)
    with job(tmp_path, 2, *words) as (spaces, (zero, one)):
        for launcher in (zero, one):
            launcher.wait_for("with 2 ranks")
        spaces.cut(0)
        for launcher in (zero, one):
            launcher.wait_for("two members cannot know which of them is cut off", err=True)
        assert "with 1 ranks" not in zero.out.read_text() + one.out.read_text()
        before = [launcher.size() for launcher in (zero, one)]
        spaces.join(0)
        zero.wait_for("with 2 ranks", after=before[0])
        one.wait_for("with 2 ranks", after=before[1])
        zero.close()
        one.wait_for("this node continues alone", err=True)
        one.wait_for("with 1 ranks")
        assert "with 1 ranks" not in zero.out.read_text()
