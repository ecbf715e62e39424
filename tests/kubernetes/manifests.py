"""The manifests under deploy/kubernetes, as kustomize would print them without its overlays."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.kubernetes.control_plane import Json

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"


def objects(folder: str) -> list[Json]:
    """All objects that the folder's kustomization names."""
    place = ROOT / folder
    kustomization = yaml.safe_load((place / "kustomization.yaml").read_text())
    return [
        body
        for name in kustomization["resources"]
        for body in yaml.safe_load_all((place / name).read_text())
    ]


def folders() -> list[str]:
    return sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("kustomization.yaml"))
