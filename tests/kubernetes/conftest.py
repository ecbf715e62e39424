from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.control_plane import ControlPlane, control_plane, eventually
from tests.kubernetes.objects import CRDS, exists, namespace, remove_records


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not assets:
        pytest.fail("KUBEBUILDER_ASSETS is not set: run `make test-k8s`")
    with control_plane(Path(assets), tmp_path_factory.mktemp("control-plane")) as made:
        for crd in CRDS:
            made.apply(crd)
        for crd in CRDS:
            eventually(lambda crd=crd: _is_served(made, crd))
        names = ("mindx-dl", "cluster-system", "team")
        for name in names:
            namespace(made, name)
        for name in names:  # the controller manager makes it; pods need it
            path = f"api/v1/namespaces/{name}/serviceaccounts/default"
            eventually(lambda path=path: exists(made, path))
        yield made


@pytest.fixture(autouse=True)
def no_records_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The records of jobs of one test are not there in the next one."""
    yield
    if "plane" in request.fixturenames:
        remove_records(request.getfixturevalue("plane"))


def _is_served(plane: ControlPlane, crd: dict[str, object]) -> bool:
    found = plane.request(
        "GET",
        f"apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}",  # type: ignore[index]
    )
    conditions = found.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
