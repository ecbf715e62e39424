from __future__ import annotations

from typing import Any

import pytest

from taskd.clusterd.cluster.interface import Key, Kind
from taskd.clusterd.cluster.objects import pod_of
from taskd.clusterd.kubernetes.relevant import relevant, shrunk

OWNER = [{"uid": "u", "name": "train", "controller": True}]


def pod(**metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "managedFields": ["long"], **metadata},
        "spec": {
            "nodeName": "n",
            "containers": [
                {
                    "image": "i",
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}],
                    "volumeMounts": [{"mountPath": "/m", "name": "v"}],
                }
            ],
        },
        "status": {"phase": "Running", "conditions": ["long"]},
    }


def test_pod_of_a_job_keeps_only_what_is_read() -> None:
    key = Key(Kind.POD, "team", "p")
    notes = {"hccl/rankIndex": "0"}
    assert relevant(key, pod(ownerReferences=OWNER, annotations=notes)) == {
        "kind": "Pod",
        "metadata": {"name": "p", "ownerReferences": OWNER, "annotations": notes},
        "spec": {
            "nodeName": "n",
            "containers": [
                {
                    "env": [{"name": "A", "value": "1"}, {"name": "B"}],
                    "volumeMounts": [{"mountPath": "/m"}],
                }
            ],
        },
        "status": {"phase": "Running"},
    }


def test_pods_of_no_job_and_foreign_config_maps_are_not_kept() -> None:
    key = Key(Kind.POD, "team", "p")
    assert relevant(key, pod(annotations={"hccl/rankIndex": "0"})) is None
    assert relevant(key, pod(ownerReferences=OWNER)) is None
    assert relevant(Key(Kind.CONFIG_MAP, "a", "other"), {"metadata": {}}) is None
    for name in ("reset-config-a", "mindx-dl-deviceinfo-n", "data-trace-a"):
        assert relevant(Key(Kind.CONFIG_MAP, "a", name), {"metadata": {}, "data": {}}) is not None
    info = Key(Kind.CONFIG_MAP, "cluster-system", "fault-job-info")
    assert relevant(info, {"metadata": {}}) is not None
    elsewhere = Key(Kind.CONFIG_MAP, "team", "fault-job-info")
    assert relevant(elsewhere, {"metadata": {}}) is None


def test_objects_of_other_types_are_read_without_an_error() -> None:
    key = Key(Kind.POD, "team", "p")
    broken = pod(ownerReferences=OWNER, annotations={"hccl/rankIndex": "0"})
    broken["spec"], broken["status"] = [1], "text"
    kept = relevant(key, broken)
    assert kept is not None
    assert kept["spec"] == {"containers": []}
    assert kept["status"] == {}


def test_listed_object_keeps_what_is_relevant_and_of_others_only_the_identity() -> None:
    ours = pod(ownerReferences=OWNER, annotations={"hccl/rankIndex": "0"})
    key = Key(Kind.POD, "", "p")
    small = shrunk(Kind.POD, ours)
    assert small == relevant(key, ours)
    assert relevant(key, small) == small
    other = {
        "metadata": {"name": "c", "namespace": "n", "uid": "u", "resourceVersion": "7"},
        "data": {"x": "y" * 1000},
    }
    small = shrunk(Kind.CONFIG_MAP, other)
    assert small == {"metadata": other["metadata"]}
    assert relevant(Key(Kind.CONFIG_MAP, "n", "c"), small) is None


@pytest.mark.parametrize(
    ("phase", "running", "finished"),
    [
        ("Pending", False, False),
        ("Running", True, False),
        ("Succeeded", False, True),
        ("Failed", False, False),
    ],
)
def test_phase_of_a_pod_says_whether_its_ranks_run(
    phase: str, running: bool, finished: bool
) -> None:
    body = pod(ownerReferences=OWNER, annotations={"hccl/rankIndex": "0"})
    body["status"]["phase"] = phase
    read = pod_of(body)
    assert read is not None
    assert (read.running, read.finished) == (running, finished)
