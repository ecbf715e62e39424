"""An etcd that is stopped, full or set back while a job trains: the job goes on, and says why.

A fault waits until etcd answers again, and is repaired then.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskd.clusterd.etcd.job_terms import job_prefix
from taskd.runtime.address import free_port
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.run.run_job import TOKEN, Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_node_zero import read_error, weights

QUOTA = 4 << 20
STEPS = 200


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with running(tmp_path / "etcd", f"--quota-backend-bytes={QUOTA}") as server:
        yield server


class Pair:
    """A job of two nodes, with one rank each, that trains until it is released."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        self.pace, self.fast = folder / "pace", folder / "fast"
        self.pace.write_text("0.3")
        self.fast.write_text("0")
        text = SAME.replace("job.steps(60)", f"job.steps({STEPS})")
        pace = "float(open(sys.argv[1]).read())"
        path = script(folder, text.replace("float(sys.argv[1])", pace))
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        self.job = f"bad{os.getpid()}-{free_port()}"
        job = [f"--job-id={self.job}", f"--etcd={etcd.client}"]
        common = ["--nnodes=2", "--nproc-per-node=1", "--strategies=recover", *ports, *job]
        alone = Job(folder, "--nproc-per-node=2", path, str(self.fast))
        self.expected = weights(alone.end().out)
        self.nodes = []
        for node in range(2):
            (folder / f"node{node}").mkdir()
            words = [*common, f"--node-rank={node}", path, str(self.pace)]
            self.nodes.append(Job(folder / f"node{node}", *words))
        self.nodes[0].wait_for("step 5")

    def steps_go_on(self) -> None:
        """All that was written before this call may have happened before."""
        seen = self.nodes[0].wait_for("step")[-1]
        found = re.search(r"step (\d+)", seen)
        assert found is not None
        self.nodes[0].wait_for(f"step {int(found[1]) + 10}")

    def end(self) -> str:
        """Its log. Fails unless the weights are those of an undisturbed run."""
        self.fast.rename(self.pace)
        ended = [job.end() for job in self.nodes]
        assert [each.code for each in ended] == [0, 0], ended
        assert weights(*(each.out for each in ended)) == self.expected
        return "".join(each.err for each in ended)


def test_job_trains_while_etcd_is_stopped_and_repairs_a_fault_afterwards(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    pair = Pair(tmp_path, etcd)
    etcd.pause()
    said = read_error(pair.nodes[0], "etcd at .* did not answer.*")[0]
    assert "training goes on" in said
    assert "with a quorum?" in said
    pair.steps_go_on()
    pair.nodes[1].worker(1).kill()
    etcd.resume()
    assert re.search(r"rank 1 \(.*signal 9, SIGKILL\) -> recover: recovered", pair.end())


def test_job_trains_while_etcd_is_full_and_repairs_a_fault_afterwards(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    pair = Pair(tmp_path, etcd)
    fill(etcd)
    pair.steps_go_on()
    pair.nodes[1].worker(1).kill()
    said = read_error(pair.nodes[0], "etcd at .* is full.*")[0]
    assert "etcdctl alarm disarm" in said
    drain(etcd)
    assert re.search(r"rank 1 \(.*signal 9, SIGKILL\) -> recover: recovered", pair.end())


def test_old_backup_of_etcd_is_refused_until_a_newer_one_is_there(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """The manager that starts next must not lead in an epoch that has existed."""
    pair = Pair(tmp_path, etcd)
    prefix = job_prefix(pair.job, TOKEN)
    epoch, leader = (b64encode(f"{prefix}/{key}".encode()).decode() for key in ("epoch", "leader"))
    for key in (epoch, leader):
        assert "deleted" in etcd.call("kv/deleterange", key=key)
    pair.nodes[0].manager().kill()
    said = read_error(pair.nodes[0], "etcd is at epoch 0, but epoch 1 has existed.*")[0]
    assert "Restore a newer backup" in said
    pair.steps_go_on()
    pair.nodes[1].worker(1).kill()
    etcd.call("kv/put", key=epoch, value=b64encode(b"1").decode())
    log = pair.end()
    assert re.search(r"rank 1 \(.*signal 9, SIGKILL\) -> recover: recovered", log)
    assert "since epoch 2" in log


def fill(etcd: EtcdServer) -> None:
    """Write until it refuses: from then on its alarm is set."""
    value = b64encode(os.urandom(512 << 10)).decode()
    for number in range(4 * QUOTA // (512 << 10)):
        key = b64encode(f"fill/{number}".encode()).decode()
        if "space exceeded" in etcd.call("kv/put", key=key, value=value):
            return
    raise AssertionError("etcd is not full")


def drain(etcd: EtcdServer) -> None:
    first, after = (b64encode(text).decode() for text in (b"fill/", b"fill0"))
    answer = etcd.call("kv/deleterange", key=first, range_end=after)
    revision = re.search(r'"revision":"(\d+)"', answer)
    assert revision is not None, answer
    etcd.call("kv/compaction", revision=revision[1], physical=True)
    etcd.call("maintenance/defragment")
    for alarm in json.loads(etcd.call("maintenance/alarm", action="GET"))["alarms"]:
        etcd.call("maintenance/alarm", action="DEACTIVATE", **alarm)
