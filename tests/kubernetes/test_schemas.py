"""The manifests against the schemas of current versions, which know more than the API server here.

Kubernetes: the typed models of lightkube. JobSet and Kubeflow Trainer: `schemas/kubeflow.json`,
made from the models in the package kubeflow-trainer-api.
"""

from __future__ import annotations

import json
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from lightkube.models import batch_v1
from msgspec import ValidationError as WrongType

from taskd.errors import DO_NOT_REPLACE
from tests.kubernetes.control_plane import Json
from tests.kubernetes.manifests import folders, objects

SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kubeflow.json").read_text())
BODIES = [(folder, body) for folder in folders() for body in objects(folder)]
OURS = [(folder, body) for folder, body in BODIES if body["kind"] not in SCHEMAS["kinds"]]
THEIRS = [(folder, body) for folder, body in BODIES if body["kind"] in SCHEMAS["kinds"]]


def model_of(body: Json) -> Any:
    group, _, version = body["apiVersion"].rpartition("/")
    module = f"{(group or 'core').split('.')[0]}_{version}"
    return getattr(import_module(f"lightkube.models.{module}"), body["kind"])


def unknown_fields(sent: object, kept: object, path: str = "") -> list[str]:
    """What the model does not know: it is not there after a conversion to the model and back."""
    if isinstance(sent, dict):
        known = kept if isinstance(kept, dict) else {}
        return [
            name
            for key, value in sent.items()
            for name in (
                unknown_fields(value, known[key], f"{path}.{key}")
                if key in known
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(sent, list) and isinstance(kept, list):
        return [
            name
            for number, (one, other) in enumerate(zip(sent, kept, strict=True))
            for name in unknown_fields(one, other, f"{path}[{number}]")
        ]
    return []


def check(body: Json, model: Any) -> None:
    assert unknown_fields(body, model.from_dict(body).to_dict()) == []


def job_specs(body: object) -> list[Json]:
    if isinstance(body, list):
        return [spec for item in body for spec in job_specs(item)]
    if not isinstance(body, dict):
        return []
    here = [body] if "backoffLimit" in body else []
    return here + [spec for value in body.values() for spec in job_specs(value)]


def _name(value: object) -> str:
    return str(value["kind"]) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("folder", "body"), OURS, ids=_name)
def test_current_kubernetes_knows_every_field(folder: str, body: Json) -> None:
    check(body, model_of(body))


def test_misspelt_field_and_wrong_type_are_found() -> None:
    """So the test above would notice one."""
    (deployment,) = (body for _, body in OURS if body["kind"] == "Deployment")
    wrong = deepcopy(deployment)
    container = wrong["spec"]["template"]["spec"]["containers"][0]
    container["readinessProbes"] = container.pop("readinessProbe")
    kept = model_of(wrong).from_dict(wrong).to_dict()
    assert unknown_fields(wrong, kept) == [".spec.template.spec.containers[0].readinessProbes"]
    container["args"] = "--cluster=kubernetes"
    with pytest.raises(WrongType):
        model_of(wrong).from_dict(wrong)


@pytest.mark.parametrize(("folder", "body"), THEIRS, ids=_name)
def test_jobset_and_trainer_know_every_field(folder: str, body: Json) -> None:
    schema = {**SCHEMAS["kinds"][body["kind"]], "$defs": SCHEMAS["$defs"]}
    Draft202012Validator(schema).validate(body)
    for spec in job_specs(body):
        check(spec, batch_v1.JobSpec)
    wrong = {**body, "spec": {**body["spec"], "misspelt": 1}}
    with pytest.raises(ValidationError):
        Draft202012Validator(schema).validate(wrong)


@pytest.mark.parametrize("folder", ["jobs/indexed-job", "jobs/jobset", "jobs/trainer"])
def test_jobs_end_with_our_exit_code_and_evictions_do_not_count(folder: str) -> None:
    (spec,) = [spec for body in objects(folder) for spec in job_specs(body)]
    final, evicted = spec["podFailurePolicy"]["rules"]
    (container,) = spec["template"]["spec"]["containers"]
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [DO_NOT_REPLACE]
    assert final["onExitCodes"]["containerName"] == container["name"]
    assert evicted["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
