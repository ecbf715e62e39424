"""The guide, followed literally: its commands with kubectl, from the first namespace to training.

In a cluster of its own, which has nothing but what the guide installs. `kubectl exec` and
`kubectl logs` need a kubelet; `test_story.py` runs the commands behind `exec`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.kubernetes.container import Image
from tests.kubernetes.control_plane import ControlPlane, control_plane
from tests.kubernetes.deployed_clusterd import leader
from tests.kubernetes.site import READY_S, Site, at_step, site, step_of
from tests.kubernetes.test_leader import RECORDS
from tests.kubernetes.test_story import TRAIN

pytestmark = pytest.mark.timeout(600)

GUIDE = (ROOT / "docs/guides/kubernetes.md").read_text()
IMAGE = "registry.example/taskd:latest"
KEEP = "[ -z ${secret+set} ] || declare -p secret >.variables"
NEEDS_KUBELET = re.compile(r"^kubectl .*( --watch| --follow| exec .*)$", re.MULTILINE)


def blocks(heading: str) -> list[str]:
    """The blocks of commands below this heading, in order."""
    _, _, rest = GUIDE.partition(f"\n## {heading}\n")
    section = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^ {8}.*\n)+", section, re.MULTILINE)
    assert found, heading
    return [NEEDS_KUBELET.sub("", textwrap.dedent(block)) for block in found]


class Engineer:
    """Types what the guide says, in a clone of this repository."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane, self._folder = plane, folder
        folder.mkdir()
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        (folder / ".variables").touch()

    def edits(self, file: str, old: str, new: str) -> None:
        path = self._folder / "deploy/kubernetes" / file
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))

    def types(self, block: str) -> str:
        """All commands of a block. The variables that it sets are there in the next one."""
        env = {
            **os.environ,
            "PATH": f"{os.environ['KUBEBUILDER_ASSETS']}:{os.environ['PATH']}",
            "KUBECONFIG": str(self._plane.kubeconfig("engineer")),
            "HOME": str(self._folder),
        }
        done = subprocess.run(
            ["bash", "-e", "-c", f". ./.variables\n{block}\n{KEEP}"],
            cwd=self._folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=READY_S,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
    if os.geteuid() != 0:
        pytest.skip("pods need network namespaces: run as root")
    if not (assets / "kubectl").exists():
        pytest.skip(f"no kubectl in {assets}")
    (tmp_path / "plane").mkdir()
    with (
        control_plane(assets, tmp_path / "plane") as plane,
        site(plane, tmp_path / "site") as made,
    ):
        (tmp_path / "site/training/train.py").write_text(TRAIN)
        yield made


def volume(place: Site) -> None:
    """What the storage of the cluster offers."""
    (place.folder / "volume").mkdir()
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(place.folder / "volume")},
    }
    about = {"name": "shared"}
    place.plane.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": about, "spec": spec}
    )


def test_engineer_follows_the_guide_from_top_to_bottom(place: Site, tmp_path: Path) -> None:
    engineer = Engineer(place.plane, tmp_path / "clone")
    for name in ("control", "worker-a", "worker-b"):
        node = place.add_node(name, pods=2)
        node.images[IMAGE] = Image(place.folder / "taskd")
    volume(place)

    for block in blocks("A job by itself"):
        engineer.types(block)
        if "apply -k" in block:
            first, second = place.pod("train-0"), place.pod("train-1")
            at_step(first, 3)
    third = place.pod("train-1", other_than=second.uid)  # the guide has deleted it
    at_step(third, step_of(first))
    engineer.types("kubectl delete -k deploy/kubernetes/jobs/statefulset")

    if place.plane.version() < (1, 21):
        budget = "clusterd/pod-disruption-budget.yaml"
        engineer.edits(budget, "policy/v1", "policy/v1beta1")
    shown = [engineer.types(block) for block in blocks("clusterd in the cluster")]
    run = leader(place)
    assert re.search(rf"^{run.name_of_pod} .* leader$", "".join(shown), re.MULTILINE)
    assert run.address is not None
    assert re.search(rf" 8899 +{re.escape(run.address.ip)} ", "".join(shown)), "one address"
    at_step(place.pod("train-0"), 3)
    records = place.plane.request("GET", RECORDS)["items"]
    assert [record["data"]["name"] for record in records] == ["train"], "clusterd knows the job"
