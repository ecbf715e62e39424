"""What a pod is given: the files of its volumes, kept fresh, and its environment."""

from __future__ import annotations

import os
import re
import shutil
from base64 import b64decode
from pathlib import Path
from uuid import uuid4

from tests.kubernetes.container import expanded
from tests.kubernetes.control_plane import ControlPlane, Json
from tests.kubernetes.watching import Watcher

Files = dict[str, bytes]
CLAIM = "api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"


class Volumes:
    def __init__(self, plane: ControlPlane, pod: Json, folder: Path) -> None:
        self._plane, self._pod, self._folder = plane, pod, folder
        self._watchers: list[Watcher] = []
        self._namespace: str = pod["metadata"]["namespace"]
        self.paths = {
            volume["name"]: self._made(volume) for volume in pod["spec"].get("volumes") or ()
        }

    def mounts(self, container: Json) -> list[tuple[Path, str]]:
        return [
            (self.paths[mount["name"]], mount["mountPath"])
            for mount in container.get("volumeMounts") or ()
        ]

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.stop()

    def _made(self, volume: Json) -> Path:
        target: Path = self._folder / volume["name"]
        target.mkdir(parents=True)
        target.chmod(0o777)
        if "persistentVolumeClaim" in volume:
            return self._claimed(volume["persistentVolumeClaim"]["claimName"])
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "secret" in volume:
            self._follow("secrets", volume["secret"]["secretName"], target)
        elif "configMap" in volume:
            self._follow("configmaps", volume["configMap"]["name"], target)
        elif "projected" in volume:
            replace_files(target, self._projected(volume["projected"]["sources"]))
        else:
            assert "emptyDir" in volume, f"this test node cannot mount {volume}"
        return target

    def _claimed(self, name: str) -> Path:
        claim = self._plane.request("GET", CLAIM.format(namespace=self._namespace, name=name))
        path = f"api/v1/persistentvolumes/{claim['spec']['volumeName']}"
        return Path(self._plane.request("GET", path)["spec"]["hostPath"]["path"])

    def _follow(self, plural: str, name: str, target: Path) -> None:
        replace_files(target, files(self._get(plural, name)))

        def changed(body: Json, gone: bool) -> None:
            if not gone:
                replace_files(target, files(body))

        path = f"api/v1/namespaces/{self._namespace}/{plural}"
        self._watchers.append(Watcher(self._plane, path, changed, fields=f"metadata.name={name}"))

    def _projected(self, sources: list[Json]) -> Files:
        found: Files = {}
        for source in sources:
            if "serviceAccountToken" in source:
                found[source["serviceAccountToken"]["path"]] = self._token().encode()
            elif "configMap" in source:
                found |= files(self._get("configmaps", source["configMap"]["name"]))
            elif "downwardAPI" in source:
                for item in source["downwardAPI"]["items"]:
                    text = field(self._pod, item["fieldRef"]["fieldPath"])
                    found[item["path"]] = text.encode()
        return found

    def _token(self) -> str:
        account = self._pod["spec"]["serviceAccountName"]
        path = f"api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self._plane.request("POST", path, request)["status"]["token"])

    def _get(self, plural: str, name: str) -> Json:
        return self._plane.request("GET", f"api/v1/namespaces/{self._namespace}/{plural}/{name}")

    # The environment

    def env(self, container: Json, **fixed: str) -> dict[str, str]:
        found = dict(fixed)
        for item in container.get("env") or ():
            found[item["name"]] = (
                self._value(item["valueFrom"])
                if "valueFrom" in item
                else expanded(item.get("value", ""), found)
            )
        return found

    def _value(self, source: Json) -> str:
        for kind, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if kind in source:
                reference = source[kind]
                return files(self._get(plural, reference["name"]))[reference["key"]].decode()
        return field(self._pod, source["fieldRef"]["fieldPath"])


def field(pod: Json, path: str) -> str:
    """A field of the downward API."""
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if keyed:
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    value = pod
    for part in path.split("."):
        value = value[part]
    return str(value)


def files(body: Json) -> Files:
    """The files of a Secret or a ConfigMap."""
    if body.get("kind") == "Secret" or "type" in body:
        return {name: b64decode(text) for name, text in (body.get("data") or {}).items()}
    return {name: text.encode() for name, text in (body.get("data") or {}).items()}


def replace_files(target: Path, content: Files) -> None:
    """All at once, as a kubelet does: a link changes from one directory to the next."""
    fresh = target / f"..{uuid4().hex}"
    fresh.mkdir()
    for name, data in content.items():
        (fresh / name).write_bytes(data)
        (fresh / name).chmod(0o444)
    link, data_link = target / "..data_tmp", target / "..data"
    link.symlink_to(fresh.name)
    old = data_link.readlink() if data_link.is_symlink() else None
    os.replace(link, data_link)
    for name in content:
        if not (target / name).is_symlink():
            (target / name).symlink_to(f"..data/{name}")
    if old is not None:
        shutil.rmtree(target / old)
