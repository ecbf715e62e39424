"""Two replicas of clusterd: one decides, and the other continues where it stopped."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request

import pytest

from taskd.core.election import ElectionConfig
from tests.kubernetes.control_plane import ControlPlane, end, eventually
from tests.kubernetes.faulty_proxy import faulty_proxy
from tests.kubernetes.objects import exists
from tests.kubernetes.replicas import Replica, labels_of, own_pod, replica

LEASE = "apis/coordination.k8s.io/v1/namespaces/mindx-dl/leases/taskd-clusterd"
RECORDS = "api/v1/namespaces/mindx-dl/configmaps?labelSelector=taskd/record%3Djob"


def holder(plane: ControlPlane) -> str:
    return str(plane.request("GET", LEASE)["spec"].get("holderIdentity") or "")


def probe(one: Replica, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{one.probes}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def declare(one: Replica, job: str) -> None:
    async with one.client(job) as client:
        assert await client.declare("retry", "recover", "dump") == 0
        assert await client.code("Init") == 0
        assert await client.code("Register") == 0


async def code_of(one: Replica, job: str) -> int:
    async with one.client(job) as client:
        return await client.code("Register")


def test_killed_leader_is_replaced_within_its_lease_and_no_job_is_lost(plane: ControlPlane) -> None:
    with replica(plane, "first") as first:
        first.wait_for("clusterd listens on port")
        with replica(plane, "second") as second:
            second.wait_for("waiting for the lease")
            assert [probe(second, path) for path in ("/healthz", "/readyz", "/")] == [200, 200, 404]
            asyncio.run(declare(first, "survivor"))
            (record,) = plane.request("GET", RECORDS)["items"]
            assert record["data"]["name"] == "survivor"
            assert record["data"]["epoch"] == str(_epoch(plane))
            assert not second.leads

            end(first.running, signal.SIGKILL)
            killed_at = time.monotonic()
            second.wait_for("clusterd listens on port")
            took_s = time.monotonic() - killed_at
            # The standby's tries, and a loaded machine, come on top.
            assert took_s < ElectionConfig().duration_s + 15.0
            assert asyncio.run(code_of(second, "survivor")) == 0  # 408 if it were unknown
            (record,) = plane.request("GET", RECORDS)["items"]
            assert record["data"]["epoch"] == str(_epoch(plane))

            assert end(second.running) == 0
            assert holder(plane) == ""


def _epoch(plane: ControlPlane) -> int:
    return int(plane.request("GET", LEASE)["spec"]["leaseTransitions"])


def test_released_lease_is_taken_without_waiting_for_its_end(plane: ControlPlane) -> None:
    with replica(plane, "first") as first:
        first.wait_for("clusterd listens on port")
        with replica(plane, "second") as second:
            second.wait_for("waiting for the lease")
            assert end(first.running) == 0
            second.wait_for("clusterd listens on port")
            assert "this process leads" in second.log.read_text()


def test_deleted_lease_is_written_again_by_the_leader(plane: ControlPlane) -> None:
    with replica(plane, "first") as first:
        first.wait_for("clusterd listens on port")
        with replica(plane, "second") as second:
            second.wait_for("waiting for the lease")
            before, epoch = holder(plane), _epoch(plane)
            plane.request("DELETE", LEASE)
            eventually(lambda: exists(plane, LEASE))
            assert (holder(plane), _epoch(plane)) == (before, epoch)
            assert not second.leads


def test_deleted_lease_and_dead_leader_cost_no_job(plane: ControlPlane) -> None:
    """The count of the terms is gone, but the records know it."""
    with replica(plane, "first") as first:
        first.wait_for("clusterd listens on port")
        asyncio.run(declare(first, "outlives-its-lease"))
        end(first.running, signal.SIGKILL)
    epoch = _epoch(plane)
    plane.request("DELETE", LEASE)
    with replica(plane, "second") as second:
        second.wait_for("clusterd listens on port")
        assert asyncio.run(code_of(second, "outlives-its-lease")) == 0
        assert _epoch(plane) > epoch


def test_pod_gets_the_right_label_although_the_server_refuses_it_at_first(
    plane: ControlPlane,
) -> None:
    """Else the Service would send jobs to a replica that does not lead, or to none."""
    own_pod(plane, "labelled", **{"taskd/role": "leader"})  # by an earlier process
    patch = ("PATCH", "/pods/labelled")
    with replica(plane, "first") as first, faulty_proxy(plane) as proxy:
        first.wait_for("clusterd listens on port")
        refused = [proxy.add(*patch, times=2, code=code) for code in (503, 403)]
        with replica(plane, "second", "", "labelled", url=proxy.url) as second:
            second.wait_for("waiting for the lease")
            eventually(lambda: probe(second, "/readyz") == 200)
            assert all(fault.hit.is_set() for fault in refused), "not ready with the old label"
            assert labels_of(plane, "labelled") == {}
            refused = [proxy.add(*patch, code=code) for code in (500, 403)]
            assert end(first.running) == 0
            second.wait_for("clusterd listens on port")
            eventually(lambda: labels_of(plane, "labelled") == {"taskd/role": "leader"})
            assert all(fault.hit.is_set() for fault in refused)
            assert end(second.running) == 0
            assert labels_of(plane, "labelled") == {}


def test_waiting_replica_stops_at_once(plane: ControlPlane) -> None:
    with replica(plane, "first") as first:
        first.wait_for("clusterd listens on port")
        with replica(plane, "second") as second:
            second.wait_for("waiting for the lease")
            assert end(second.running) == 0


def test_leader_that_was_stopped_too_long_writes_nothing_more_and_exits(
    plane: ControlPlane,
) -> None:
    with replica(plane, "first") as first, replica(plane, "second") as second:
        eventually(lambda: first.leads or second.leads)
        leader, other = (first, second) if first.leads else (second, first)
        other.wait_for("waiting for the lease")
        leader.running.send_signal(signal.SIGSTOP)
        other.wait_for("clusterd listens on port")
        leader.running.send_signal(signal.SIGCONT)
        assert leader.running.wait(60) == 1
        assert "the lease is lost" in leader.log.read_text()


@pytest.mark.parametrize("options", [("--journal", "x"), ("--cluster-dir", "x")])
def test_options_of_another_cluster_are_refused(
    plane: ControlPlane, options: tuple[str, str]
) -> None:
    with replica(plane, "wrong", "", "", *options) as wrong:
        assert wrong.running.wait(60) != 0
        assert "cannot be combined with --cluster" in wrong.log.read_text()
