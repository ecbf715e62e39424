"""A cluster in a directory: one YAML file per object, written atomically, watched with inotify.

    podgroups/<namespace>.<name>.yaml   pods/…   configmaps/…   nodes/<name>.yaml

Add, edit or remove a file, and clusterd sees what it would see in Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from taskd.clusterd.cluster.in_memory import ObjectCache, count_version, named, version_of
from taskd.clusterd.cluster.inotify import Watch
from taskd.clusterd.cluster.interface import (
    ClusterRefused,
    ClusterUnreachable,
    Json,
    Key,
    Kind,
    key_of,
    merged,
    uid_of,
)
from taskd.clusterd.keyed_lock import KeyedLock

log = logging.getLogger(__name__)

FOLDERS = {
    Kind.POD_GROUP: "podgroups",
    Kind.POD: "pods",
    Kind.CONFIG_MAP: "configmaps",
    Kind.NODE: "nodes",
}
SUFFIX = ".yaml"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class YamlCluster(ObjectCache):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._keys: dict[Path, Key] = {}
        self._paths: dict[Key, Path] = {}
        self._writing: KeyedLock[Key] = KeyedLock()
        self._watch: Watch | None = None

    async def start(self) -> None:
        folders = [self._directory / folder for folder in FOLDERS.values()]
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._watch = Watch(folders, self._file_changed)
        except OSError as error:
            raise ClusterUnreachable(
                f"cannot use the cluster directory {self._directory}: {error}"
            ) from error
        self._read_all()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    async def patch(self, key: Key, patch: Mapping[str, Any], version: str | None = None) -> Json:
        async with self._writing.hold(key):
            path = self._path(key)
            while True:
                self._read(path)
                current = self.get(key)
                if current is None:
                    raise ClusterRefused(f"{key} does not exist")
                if version is not None and version_of(current) != version:
                    raise ClusterRefused(f"{key} has changed since it was read")
                body = merged(current, patch)
                count_version(body, current)
                if await self._write(key, path, body, current):
                    return body

    async def create(self, key: Key, body: Json) -> Json:
        async with self._writing.hold(key):
            if self.get(key) is not None:
                raise ClusterRefused(f"{key} already exists")
            whole = named(key, body)
            count_version(whole, None)
            await self._write(key, self._path(key), whole, None)
            return whole

    async def delete(self, key: Key, uid: str = "") -> None:
        async with self._writing.hold(key):
            path = self._path(key)
            self._read(path)
            known = self.get(key)
            if known is not None and uid not in ("", uid_of(known)):
                return
            try:
                await asyncio.to_thread(path.unlink, missing_ok=True)
            except OSError as error:
                raise ClusterUnreachable(f"cannot remove {key}: {error}") from error
            self._gone(path)

    def _path(self, key: Key) -> Path:
        name = f"{key.namespace}.{key.name}" if key.namespace else key.name
        usual = self._directory / FOLDERS[key.kind] / f"{name}{SUFFIX}"
        return self._paths.get(key, usual)

    async def _write(self, key: Key, path: Path, body: Json, before: Json | None) -> bool:
        """False: another process has written the file in the meantime."""
        try:
            written = await asyncio.to_thread(_replace, path, body, before)
        except OSError as error:
            raise ClusterUnreachable(f"cannot write {key}: {error}") from error
        # Read what is there now, not what we wrote: another process may have removed it since.
        self._read(path)
        return written

    # From the disk into the cache

    def _file_changed(self, path: Path | None) -> None:
        if path is None:
            log.warning(
                "directory=%s changed too fast for inotify: reading all files again",
                self._directory,
            )
            self._read_all()
        elif path.suffix == SUFFIX and not path.name.startswith("."):
            self._read(path)

    def _read_all(self) -> None:
        found = [path for folder in FOLDERS.values() for path in _yaml_in(self._directory / folder)]
        for path in set(self._keys) - set(found):
            self._gone(path)
        for path in found:
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            body = yaml.load(path.read_bytes(), Loader=LOADER)
        except FileNotFoundError:
            self._gone(path)
            return
        except (OSError, yaml.YAMLError) as error:
            log.warning("file=%s cannot be read, keeping its last valid content: %s", path, error)
            return
        try:
            key = key_of(body if isinstance(body, dict) else {})
        except ValueError as error:
            log.warning("file=%s is not a cluster object: %s", path, error)
            return
        if self._keys.get(path, key) != key:
            self._gone(path)
        self._there(path, key, body)

    def _there(self, path: Path, key: Key, body: Json) -> None:
        self._keys[path], self._paths[key] = key, path
        self.set(key, body)

    def _gone(self, path: Path) -> None:
        key = self._keys.pop(path, None)
        if key is not None and self._paths.get(key) == path:
            del self._paths[key]
            self.set(key, None)


def _yaml_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == SUFFIX and path.name[0] != "."]


def _replace(path: Path, body: Json, before: Json | None) -> bool:
    """Replace atomically: readers see the old file until the new one is on disk."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("wb") as file:
        file.write(yaml.dump(body, Dumper=DUMPER, sort_keys=False, encoding="utf-8"))
        file.flush()
        os.fsync(file.fileno())
    # Other processes write without our lock: do not undo what they wrote during the fsync.
    if before is not None and yaml.load(path.read_bytes(), Loader=LOADER) != before:
        fresh.unlink()
        return False
    fresh.rename(path)
    return True
