"""Training on a cluster: the shipped manifests, the real controllers, and one fault after another.

Every story ends with the weights of an undisturbed run, and the ranks that no fault has hit are the
same processes from the beginning to the end.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskd.core.election import ElectionConfig
from taskd.runtime.tokens import job_scope, token_for
from tests import ROOT
from tests.integration.certificates import Authority
from tests.kubernetes.ascend_parts import AscendParts
from tests.kubernetes.control_plane import ControlPlane, Json, eventually
from tests.kubernetes.deployed_clusterd import SECRET, leader, start_clusterd
from tests.kubernetes.indexed_job import indexed_job
from tests.kubernetes.jobset import job_of
from tests.kubernetes.manifests import objects
from tests.kubernetes.node import PodRun
from tests.kubernetes.site import Site, at_step, rank_pid, site, trains_on
from tests.kubernetes.test_manifests import for_version

pytestmark = pytest.mark.timeout(900)

STEPS = 120
TRAIN = f"""
import hashlib, os, threading
import torch
from torch.nn.parallel import DistributedDataParallel
import taskd.torch as taskd

job = taskd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.BatchNorm1d(64),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(64, 16),
)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job.protect(model=model, optimizer=optimizer)
for step in job.steps({STEPS}):
    with step:
        batch = torch.randn(8, 16) + job.rank
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(0.02 if os.path.exists("hurry") else 0.25)
    print(f"step {{int(step)}}", flush=True)
state = torch.cat([tensor.flatten().double() for tensor in net.state_dict().values()])
print("weights", hashlib.sha256(state.numpy().tobytes()).hexdigest(), flush=True)
"""
"""Its steps are slow until all faults have come, so that none comes too late."""
UNHANDLED = re.compile("Exception in callback|was never (awaited|retrieved)|deleted while in use")
"""What a process says that ends in disorder."""
WEIGHTS = re.compile(r"weights (\w{64})")
END_S = 240.0


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights. With xdist the processes share one run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _trained(tmp_path_factory.mktemp("undisturbed"))
    kept = tmp_path_factory.getbasetemp().parent / "undisturbed"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(_trained(tmp_path_factory.mktemp("undisturbed")))
    return kept.read_text()


def _trained(folder: Path) -> str:
    (folder / "train.py").write_text(TRAIN)
    (folder / "hurry").touch()
    command = [sys.executable, "-m", "taskd", "run", "--nproc-per-node=4", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=END_S
    )
    assert done.returncode == 0, done.stderr
    (weights,) = set(WEIGHTS.findall(done.stdout))
    return str(weights)


@pytest.fixture
def place(plane: ControlPlane, tmp_path: Path) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("pods need network namespaces: run as root")
    with site(plane, tmp_path) as made:
        (tmp_path / "training" / "train.py").write_text(TRAIN)
        yield made


def start_with_clusterd(place: Site, *, deletes: bool = False) -> list[Json]:
    """All that a job needs, on a node of its own; returns the objects to remove."""
    place.add_node("control", pods=2)
    authority = Authority(place.folder, "authority")
    clusterd = start_clusterd(place, authority, deletes=deletes)
    place.claim("checkpoints")
    place.secret("team", "train", {"token": b"0123456789abcdef" * 4})
    give_token(place, "train")
    return clusterd


def give_token(place: Site, job: str) -> None:
    ca, token = place.folder / "authority/ca.pem", token_for(SECRET, job_scope(job))
    place.secret("team", "train-clusterd", {"token": token.encode(), "ca.crt": ca.read_bytes()})


def with_clusterd(job: str = "train") -> list[Json]:
    """The job of that id."""
    bodies = objects("jobs/with-clusterd")
    (stateful,) = (body for body in bodies if body["kind"] == "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (name,) = (one for one in container["env"] if one["name"] == "PET_RDZV_ID")
    name["value"] = job
    container["env"].append({"name": "TASKD_LOG_LEVEL", "value": "INFO"})
    return bodies


def lose_pod(place: Site, run: PodRun) -> None:
    """Its processes end and its node does not report it; an operator removes the object."""
    run.kill()
    where = run.body["metadata"]["namespace"]
    path = f"api/v1/namespaces/{where}/pods/{run.name_of_pod}"
    place.plane.request("DELETE", path, {"gracePeriodSeconds": 0})


def guide_says(run: PodRun, pod: str) -> str:
    """Do in this pod what the guide does in the pod of that name; the output."""
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    (command,) = re.findall(rf"kubectl -n team exec {pod} -- (.+)", guide)
    assert run.container is not None
    done = run.container.execute(shlex.split(command))
    assert done.returncode == 0, done.stderr
    return done.stdout


def ranks(run: PodRun, *numbers: int) -> list[int]:
    found: list[int] = eventually(
        lambda: pids if all(pids := [rank_pid(run, number) for number in numbers]) else None
    )
    return found


def kill_rank(run: PodRun, number: int) -> None:
    (pid,) = ranks(run, number)
    os.kill(pid, signal.SIGKILL)


def hurry(place: Site) -> None:
    (place.folder / "training" / "hurry").touch()


def weights(place: Site, *runs: PodRun) -> set[str]:
    """Once every rank has printed them."""
    hurry(place)
    eventually(
        lambda: sum(len(WEIGHTS.findall(run.text)) for run in runs) == 4,
        END_S,
        f"see {[str(run.log) for run in runs]}",
    )
    assert not [run for run in place.all_runs() if UNHANDLED.search(run.text)]
    return {found for run in runs for found in WEIGHTS.findall(run.text)}


def phase(place: Site, run: PodRun) -> str:
    return str(place.plane.request("GET", pod_path(run))["status"]["phase"])


def pod_path(run: PodRun) -> str:
    return f"api/v1/namespaces/team/pods/{run.name_of_pod}"


def test_statefulset_trains_through_every_fault_to_the_undisturbed_weights(
    place: Site, undisturbed: str
) -> None:
    """A rank is killed, a pod deleted, a node lost; clusterd's leader dies during a repair."""
    plane = place.plane
    clusterd = start_with_clusterd(place)
    first_leader = leader(place)
    for name in ("worker-a", "worker-b"):
        place.add_node(name, pods=1)
    job = with_clusterd()
    place.apply(job)
    first, second = place.pod("train-0"), place.pod("train-1")
    at_step(first, 2)
    survivors = ranks(first, 0, 1)

    kill_rank(second, 3)
    trains_on(first)
    assert place.find("train-1") is second, "a lost rank is repaired inside its pod"

    plane.request("DELETE", "api/v1/namespaces/team/pods/train-1")
    third = place.pod("train-1", other_than=second.uid)
    trains_on(third)

    place.add_node("worker-c", pods=1)
    lost = next(name for name, node in place.nodes.items() if node.pod("train-1") is third)
    assert place.lose_node(lost) == ["train-1"]
    lose_pod(place, third)
    fourth = place.pod("train-1", other_than=third.uid)
    trains_on(fourth)

    assert ranks(first, 0, 1) == survivors
    kill_rank(fourth, 2)
    lose_pod(place, first_leader)
    next_leader = leader(place, other_than=first_leader.uid)
    leads_at = time.monotonic()
    eventually(lambda: "Idle -> Stopping" in next_leader.text, END_S, str(next_leader.log))
    assert time.monotonic() - leads_at < ElectionConfig().duration_s, "the job finds it soon"
    trains_on(first)
    assert ranks(first, 0, 1) == survivors, "they keep their processes, and so their memory"
    assert weights(place, first, fourth) == {undisturbed}
    place.remove([*job, *clusterd])


def test_device_report_moves_a_pod_to_another_node_while_the_leader_of_clusterd_dies(
    place: Site, undisturbed: str
) -> None:
    """The next leader completes the repair that it finds in the record of the job."""
    plane = place.plane
    clusterd = start_with_clusterd(place, deletes=True)
    first_leader = leader(place)
    for name in ("worker-h", "worker-i", "worker-j"):
        place.add_node(name, pods=1)
    job = objects("jobs/statefulset")
    (stateful,) = (body for body in job if body["kind"] == "StatefulSet")
    stateful["spec"]["replicas"] = 0  # the id of the job is the uid that the object gets now
    parts = AscendParts(plane, plane.apply(stateful), per_pod=2, strategies="recover,dump,exit")
    give_token(place, parts.uid)
    place.apply(with_clusterd(parts.uid))
    first, second = place.pod("train-0"), place.pod("train-1")
    at_step(first, 2)
    survivors = ranks(first, 0, 1)

    broken = second.node.name
    parts.device_breaks(broken)
    eventually(lambda: "Negotiating -> Replacing" in first_leader.text, END_S)
    lose_pod(place, first_leader)
    next_leader = leader(place, other_than=first_leader.uid)
    eventually(lambda: "Replacing -> Idle" in next_leader.text, END_S, str(next_leader.log))
    assert ranks(first, 0, 1) == survivors, "they keep their processes, and so their memory"
    # If the first leader dies before it has deleted the pod, the kubelet starts the pod's container
    # again. The next leader deletes the pod then, and the loss of that container is an incident of
    # its own; but it costs no other pod.
    hurry(place)
    eventually(lambda: "all ranks have finished" in next_leader.text, END_S, str(next_leader.log))
    last = place.pod("train-1", other_than=second.uid)
    assert last.node.name != broken
    pods = {run.uid for run in place.all_runs() if run.hostname == "train-1"}
    assert pods == {second.uid, last.uid}
    assert weights(place, first, last) == {undisturbed}
    parts.close()
    place.remove([*job, *clusterd])


def bring_etcd(place: Site) -> None:
    """The image of etcd, and a volume for each of its members."""
    shutil.copy(Path(os.environ["KUBEBUILDER_ASSETS"]) / "etcd", place.folder / "etcd")
    for member in range(3):
        place.claim(f"data-train-etcd-{member}")


@pytest.mark.parametrize("folder", ["statefulset", "with-clusterd", "with-etcd"])
def test_first_pod_comes_back_and_nothing_is_lost(
    place: Site, undisturbed: str, folder: str
) -> None:
    """The manager that leads runs there. Without an etcd the ranks of the other pod wait for it;
    with one, that pod leads then. They keep their memory."""
    clusterd = start_with_clusterd(place) if folder == "with-clusterd" else []
    for name in ("worker-k", "worker-l"):
        place.add_node(name, pods=1)
    place.claim("checkpoints")
    place.secret("team", "train", {"token": b"0123456789abcdef" * 4})
    if folder == "with-etcd":
        place.add_node("control", pods=3)
        bring_etcd(place)
    job = [for_version(body, place.plane.version()) for body in objects(f"jobs/{folder}")]
    place.apply(job)
    first, second = place.pod("train-0"), place.pod("train-1")
    at_step(second, 2)
    survivors = ranks(second, 2, 3)
    place.plane.request("DELETE", pod_path(first))
    third = place.pod("train-0", other_than=first.uid)
    trains_on(third)
    assert ranks(second, 2, 3) == survivors
    if folder == "with-etcd":  # now the other pod leads; it is lost, with a member of etcd
        survivors = ranks(third, 0, 1)
        lose_pod(place, place.pod("train-etcd-1"))
        lose_pod(place, second)
        second = place.pod("train-1", other_than=second.uid)
        trains_on(second)
        assert ranks(third, 0, 1) == survivors
    assert weights(place, third, second) == {undisturbed}
    place.remove([*job, *clusterd])


@pytest.mark.parametrize("folder", ["indexed-job", "jobset", "trainer"])
def test_indexed_job_trains_through_a_lost_rank_and_a_lost_pod(
    place: Site, undisturbed: str, folder: str
) -> None:
    """Also as a JobSet and as a TrainJob, whose controllers make such a Job."""
    for name in ("worker-d", "worker-e"):
        place.add_node(name, pods=1)
    place.claim("checkpoints")
    place.secret("team", "train", {"token": b"0123456789abcdef" * 4})
    bodies = objects(f"jobs/{folder}")
    for body in bodies:
        if body["kind"] == "TrainJob":  # else one rank per core of this machine
            body["spec"]["trainer"]["numProcPerNode"] = 2
    job = job_of(bodies)
    name = job[-1]["metadata"]["name"]
    with indexed_job(place.plane, job):
        first, second = (place.pod(f"{name}-{index}") for index in range(2))
        at_step(first, 2)
        survivors = ranks(first, 0, 1)
        assert "manager    Training" in guide_says(first, "train-0")
        guide_says(second, "train-1")  # it kills rank 3
        trains_on(first)
        place.plane.request("DELETE", pod_path(second))
        third = place.pod(f"{name}-1", other_than=second.uid)
        trains_on(third)
        assert ranks(first, 0, 1) == survivors
        assert weights(place, first, third) == {undisturbed}
        eventually(lambda: {phase(place, run) for run in (first, third)} == {"Succeeded"})


def test_job_whose_script_is_wrong_is_not_replaced(place: Site) -> None:
    """Exit code 78 ends an Indexed Job; a StatefulSet's pod stays, and says so."""
    (place.folder / "training" / "train.py").write_text("import no_such_module\n")
    for name in ("worker-f", "worker-g"):
        place.add_node(name, pods=2)
    place.claim("checkpoints")
    place.secret("team", "train", {"token": b"0123456789abcdef" * 4})
    stateful = objects("jobs/statefulset")
    place.apply(stateful)
    pods = [place.pod(f"train-{index}") for index in range(2)]
    for run in pods:
        eventually(lambda run=run: "ended with code 78" in run.text, END_S, str(run.log))
        assert run.restarts == 0
    place.remove(stateful)
    with indexed_job(place.plane, objects("jobs/indexed-job")) as ended:
        (condition,) = eventually(ended, END_S)
        assert (condition["type"], condition["reason"]) == ("Failed", "PodFailurePolicy")
