"""The manifests under deploy/kubernetes, as kustomize would print them without other images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.control_plane import Json

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
KEYS = {"volumeMounts": "mountPath"}
"""By which of their fields the items of a list are matched; most by their name."""


def objects(folder: str) -> list[Json]:
    """All objects that the folder's kustomization names, with its patches."""
    place = ROOT / folder
    kustomization = yaml.safe_load((place / "kustomization.yaml").read_text())
    bodies: list[Json] = []
    for name in kustomization["resources"]:
        path = (place / name).resolve()
        if path.is_dir():
            bodies += objects(str(path.relative_to(ROOT)))
        else:
            bodies += yaml.safe_load_all(path.read_text())
    for patch in kustomization.get("patches", ()):
        change = yaml.safe_load((place / patch["path"]).read_text())
        (number,) = (i for i, body in enumerate(bodies) if _identity(body) == _identity(change))
        bodies[number] = merged(bodies[number], change)
    return bodies


def _identity(body: Json) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]


def merged(before: Any, change: Any, field: str = "") -> Any:
    """A strategic merge patch."""
    if isinstance(before, dict) and isinstance(change, dict):
        return {
            key: merged(before[key], change[key], key)
            if key in before and key in change
            else before.get(key, change.get(key))
            for key in [*before, *change]
        }
    if isinstance(before, list) and isinstance(change, list):
        by = KEYS.get(field, "name")
        changed = {item[by]: item for item in change}
        kept = [
            merged(item, changed.pop(item[by])) if item[by] in changed else item for item in before
        ]
        return [*kept, *changed.values()]
    return change


def folders() -> list[str]:
    return sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("kustomization.yaml"))
