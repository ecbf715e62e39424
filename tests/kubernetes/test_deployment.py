"""The shipped Deployment of clusterd on a test node: probes, rights, metrics, certificates."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.integration.certificates import Authority
from tests.kubernetes.control_plane import ControlPlane, eventually
from tests.kubernetes.deployed_clusterd import SERVER, leader, renew_certificate, start_clusterd
from tests.kubernetes.node import PodRun
from tests.kubernetes.pod_network import PodAddress, inside
from tests.kubernetes.site import READY_S, Site, site

pytestmark = [pytest.mark.timeout(600), pytest.mark.every_run]

HEALTH = """
import sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

with open(sys.argv[1], "rb") as file:
    credentials = grpc.ssl_channel_credentials(file.read())
options = [("grpc.ssl_target_name_override", sys.argv[3])]
with grpc.secure_channel(sys.argv[2], credentials, options) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def place(
    plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("pods need network namespaces: run as root")
    with site(plane, tmp_path_factory.mktemp("deployment")) as made:
        made.add_node("control", pods=4)
        objects = start_clusterd(made, authority)
        yield made
        made.remove(objects)


def replicas(place: Site) -> list[PodRun]:
    """Both, once they are ready: now, not before the API server was restarted."""
    path = "api/v1/namespaces/mindx-dl/pods?labelSelector=app%3Dclusterd"

    def ready() -> list[PodRun]:
        names = [
            item["metadata"]["name"]
            for item in place.plane.request("GET", path)["items"]
            if any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in item["status"].get("conditions") or ()
            )
            and "deletionTimestamp" not in item["metadata"]
        ]
        runs = (place.find(name) for name in names)
        found = [run for run in runs if run is not None and run.ready]
        return found if len(found) == 2 else []

    runs: list[PodRun] = eventually(ready, READY_S)
    return runs


def address(run: PodRun) -> PodAddress:
    assert run.address is not None
    return run.address


def test_both_replicas_are_ready_and_the_service_has_the_leader_alone(place: Site) -> None:
    runs = replicas(place)
    assert leader(place).uid in {run.uid for run in runs}


def test_leader_has_no_rights_on_its_machine(place: Site) -> None:
    container = leader(place).container
    assert container is not None
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{container.pids()[0]}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == ["9000"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def test_health_service_and_metrics_answer(place: Site, authority: Authority) -> None:
    run = leader(place)
    where = address(run)
    command = [
        *("nsenter", f"--net={where.path}", sys.executable, "-c", HEALTH),
        *(str(authority.ca), f"{where.ip}:8899", SERVER),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert asked.stdout.strip() == "SERVING", asked.stderr

    def metrics() -> str:
        with urllib.request.urlopen(f"http://{where.ip}:9899/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    assert "taskd_clusterd_jobs " in inside(where, metrics)


def serial(run: PodRun, authority: Authority) -> bytes:
    """The certificate that the leader presents to a new connection."""
    where = address(run)

    def connect() -> bytes:
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((where.ip, 8899), 60) as plain,
            context.wrap_socket(plain, server_hostname=SERVER) as secured,
        ):
            return secured.getpeercert(binary_form=True) or b""

    return inside(where, connect)


def test_renewed_certificate_is_used_without_a_restart(place: Site, authority: Authority) -> None:
    run = leader(place)
    before = serial(run, authority)
    renew_certificate(place, authority)
    eventually(lambda: serial(run, authority) != before, READY_S)
    assert (leader(place).uid, run.restarts) == (run.uid, 0)


def test_restarted_api_server_ends_with_one_leader(place: Site) -> None:
    """A leader that could not renew its lease meanwhile restarts; the other one may lead then."""
    place.plane.restart()
    assert leader(place).uid in {run.uid for run in replicas(place)}


def test_other_replica_leads_after_the_leader_is_killed(place: Site) -> None:
    replicas(place)
    first = leader(place)
    assert first.container is not None
    restarts = first.restarts
    os.kill(first.container.pids()[0], signal.SIGKILL)
    eventually(lambda: leader(place).uid != first.uid, READY_S)
    replicas(place)
    assert first.restarts == restarts + 1, "its node starts it again"
