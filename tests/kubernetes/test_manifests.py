"""The API server accepts every manifest, with server-side apply: unknown fields are errors."""

from __future__ import annotations

import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.control_plane import ControlPlane, Json, Refused
from tests.kubernetes.manifests import ROOT, folders, objects


def for_version(body: Json, version: tuple[int, int]) -> Json:
    """Without what older servers do not know; `test_schemas.py` checks that."""
    body = deepcopy(body)
    if body["kind"] == "PodDisruptionBudget" and version < (1, 21):
        body["apiVersion"] = "policy/v1beta1"
    if body["kind"] == "Job" and version < (1, 26):
        del body["spec"]["podFailurePolicy"]
    if body["kind"] == "Job" and version < (1, 21):
        del body["spec"]["completionMode"]
    return body


def test_every_folder_is_tested() -> None:
    assert folders() == [
        "clusterd",
        "jobs/indexed-job",
        "jobs/jobset",
        "jobs/statefulset",
        "jobs/trainer",
        "jobs/with-clusterd",
        "jobs/with-etcd",
    ]
    files = {path for path in ROOT.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert sum(len(objects(folder)) for folder in folders()) >= len(files)


@pytest.mark.parametrize("folder", folders())
def test_kustomize_makes_the_objects_that_the_tests_use(folder: str) -> None:
    kubectl = Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "kubectl"
    if not kubectl.exists():
        pytest.skip("no kubectl")
    made = subprocess.run(
        [kubectl, "kustomize", ROOT / folder], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    texts = [_without_images(body) for body in yaml.safe_load_all(made.stdout)]
    ours = [_without_images(body) for body in objects(folder)]
    assert sorted(texts) == sorted(ours)


def _without_images(body: Json) -> str:
    """As text. Kustomize sets the images' names; lists of env and volumes have any order."""
    body = deepcopy(body)
    for spec in _pod_specs(body):
        spec.get("volumes", []).sort(key=lambda volume: str(volume["name"]))
        for container in spec["containers"]:
            del container["image"]
            for name, key in (("env", "name"), ("volumeMounts", "mountPath")):
                container.get(name, []).sort(key=lambda item, key=key: str(item[key]))
    return json.dumps(body, sort_keys=True)


@pytest.mark.parametrize("folder", folders())
def test_api_server_accepts_the_manifests(plane: ControlPlane, folder: str) -> None:
    version = plane.version()
    for body in objects(folder):
        accepted = plane.apply(for_version(body, version), dry_run=True)
        assert accepted["metadata"]["name"] == body["metadata"]["name"]


def test_api_server_refuses_a_manifest_with_a_misspelt_field(plane: ControlPlane) -> None:
    """So the test above would notice one."""
    (service,) = (body for body in objects("clusterd") if body["kind"] == "Service")
    wrong = deepcopy(service)
    wrong["spec"]["selectors"] = wrong["spec"].pop("selector")
    with pytest.raises(Refused, match="selectors"):
        plane.apply(wrong, dry_run=True)


@pytest.mark.parametrize("folder", [name for name in folders() if name != "clusterd"])
def test_pods_of_jobs_have_no_permissions_and_their_token_from_a_secret(folder: str) -> None:
    specs = [spec for body in objects(folder) for spec in _pod_specs(body)]
    if folder == "jobs/trainer":
        assert len(specs) == 1
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in spec
        (container,) = spec["containers"]
        if container["name"] == "etcd":
            assert spec["securityContext"]["runAsNonRoot"] is True
            continue
        env = {item["name"]: item for item in container["env"]}
        assert "secretKeyRef" in env["TASKD_TOKEN"]["valueFrom"]
        assert env["PET_SIGNALS_TO_HANDLE"]["value"] == "SIGINT"


def test_clusterd_satisfies_the_restricted_standard_and_imposes_it_on_no_other_pod() -> None:
    """Ascend's NodeD, which mounts folders of its machine, is in the same namespace."""
    (spec,) = [spec for body in objects("clusterd") for spec in _pod_specs(body)]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert {*spec["securityContext"]} >= {"runAsNonRoot", "runAsUser", "seccompProfile"}
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"secret", "emptyDir", "configMap", "projected"}
    labels = [body["metadata"].get("labels", {}) for body in objects("clusterd")]
    assert not any("pod-security.kubernetes.io/enforce" in known for known in labels)


def _pod_specs(body: object) -> list[Json]:
    if isinstance(body, list):
        return [spec for item in body for spec in _pod_specs(item)]
    if not isinstance(body, dict):
        return []
    here = [body] if isinstance(body.get("containers"), list) else []
    return here + [spec for value in body.values() for spec in _pod_specs(value)]
