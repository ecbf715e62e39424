"""clusterd as the shipped Deployment, on a test node."""

from __future__ import annotations

from pathlib import Path

from tests.integration.certificates import Authority
from tests.kubernetes.control_plane import Json, Refused, eventually
from tests.kubernetes.manifests import objects
from tests.kubernetes.node import PodRun
from tests.kubernetes.site import READY_S, Site
from tests.kubernetes.test_manifests import for_version

SERVER = "clusterd-grpc-svc.mindx-dl.svc"
SECRET = "the-secret-from-which-the-tokens-of-all-jobs-are-made"


def leader(place: Site, other_than: str = "") -> PodRun:
    """The pod behind clusterd's Service; another one than the one with that uid."""

    def found() -> PodRun | None:
        path = "api/v1/namespaces/mindx-dl/endpoints/clusterd-grpc-svc"
        try:
            subsets = place.plane.request("GET", path).get("subsets") or ()
        except Refused:
            return None
        names = [one["targetRef"]["name"] for sub in subsets for one in sub.get("addresses") or ()]
        run = place.find(names[0]) if len(names) == 1 else None
        return run if run is not None and run.uid != other_than else None

    run: PodRun = eventually(found, READY_S)
    return run


def renew_certificate(place: Site, authority: Authority) -> None:
    key, certificate = authority.issue("clusterd", host=SERVER)
    tls = {"tls.key": Path(key).read_bytes(), "tls.crt": Path(certificate).read_bytes()}
    place.secret("mindx-dl", "clusterd-tls", tls)


def start_clusterd(place: Site, authority: Authority, *, deletes: bool = False) -> list[Json]:
    """`deletes`: with the option and the right to delete pods, as the guide describes it."""
    renew_certificate(place, authority)
    place.secret("mindx-dl", "clusterd-tokens", {"tokens": f"secret {SECRET}\n".encode()})
    bodies = [for_version(body, place.plane.version()) for body in objects("clusterd")]
    if deletes:
        for body in bodies:
            _let_it_delete_pods(body)
    place.apply(bodies)
    return [body for body in bodies if body["kind"] in ("Deployment", "Service")]


def _let_it_delete_pods(body: Json) -> None:
    if body["kind"] == "Deployment":
        body["spec"]["template"]["spec"]["containers"][0]["args"].append("--delete-pods")
    elif body["kind"] == "ClusterRole":
        for rule in body["rules"]:
            if rule["resources"] == ["pods"]:
                rule["verbs"].append("delete")
