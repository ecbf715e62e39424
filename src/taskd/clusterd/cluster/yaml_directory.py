"""A cluster in a directory: one YAML file per object, written atomically, watched with inotify.

    podgroups/<namespace>.<name>.yaml   pods/…   configmaps/…   nodes/<name>.yaml

Add, edit or remove a file, and clusterd sees what it would see in Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from taskd.runtime.files import renames
from taskd.runtime.files.private_files import read_small

log = logging.getLogger(__name__)

FOLDERS = {
    Kind.POD_GROUP: "podgroups",
    Kind.POD: "pods",
    Kind.CONFIG_MAP: "configmaps",
    Kind.NODE: "nodes",
}
SUFFIX = ".yaml"
LIMIT_BYTES = 4 << 20
"""The largest file: Kubernetes has no objects above 1.5 MiB."""
MOST_LEVELS, MOST_NODES, MOST_DIGITS = 64, 1_000_000, 400
PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError)
"""What PyYAML raises, besides its own errors, for a value that does not fit its tag."""


class KubernetesLoader(PARSER):  # type: ignore[misc]
    """Reads `1:30` as text, as Kubernetes does: numbers to the base 60 take minutes if they are
    long, and some are larger than any float."""


def _number(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def construct(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        if len(text) > MOST_DIGITS:
            raise ValueError(f"it has a number of {len(text)} characters")
        return text if ":" in text else build(loader, node)

    return construct


KubernetesLoader.add_constructor("tag:yaml.org,2002:int", _number(PARSER.construct_yaml_int))
KubernetesLoader.add_constructor("tag:yaml.org,2002:float", _number(PARSER.construct_yaml_float))
LOADER = KubernetesLoader


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
            if not await self._write(key, self._path(key), whole, None):
                raise ClusterRefused(f"{key} already exists")
            return whole

    async def delete(self, key: Key, uid: str = "") -> None:
        async with self._writing.hold(key):
            path = self._path(key)
            self._read(path)
            known = self.get(key)
            if known is not None and uid not in ("", uid_of(known)):
                return
            try:
                await asyncio.to_thread(_remove, path, uid)
            except OSError as error:
                raise ClusterUnreachable(f"cannot remove {key}: {error}") from error
            self._read(path)

    def _path(self, key: Key) -> Path:
        name = quote(f"{key.namespace}.{key.name}" if key.namespace else key.name, safe=" :@")
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
            body = _content(path)
        except FileNotFoundError:
            self._gone(path)
            return
        except (OSError, yaml.YAMLError, ValueError) as error:
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


def _content(path: Path) -> Any:
    """Raises OSError, YAMLError or ValueError. A few bytes of YAML can crash a reader that trusts
    them: by levels without end, by a few aliases that stand for gigabytes, by values that do not
    fit their tag, or by being a pipe."""
    text = read_small(os.path.realpath(path), LIMIT_BYTES)
    _check_shape(text)
    try:
        return yaml.load(text, Loader=LOADER)
    except UNREADABLE as error:
        raise ValueError(f"it has a value that does not fit its type: {error!r}") from error


def _check_shape(text: bytes) -> None:
    """With the events of the parser, which uses no stack."""
    level = nodes = 0
    anchors: dict[str, int] = {}
    open_anchors: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=PARSER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise ValueError("it contains itself")
            nodes += anchors[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
            anchors[event.anchor] = 1
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
            open_anchors.append((event.anchor, nodes))
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
            anchor, before = open_anchors.pop()
            if anchor is not None:
                anchors[anchor] = nodes - before + 1
        if level > MOST_LEVELS or nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_LEVELS} levels, or {MOST_NODES} values")


def _replace(path: Path, body: Json, before: Json | None) -> bool:
    """Replace `before` atomically: readers see the old file until the new one is on disk. Other
    processes write without our lock; False, and their file stays, if they were faster."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    text: bytes = yaml.dump(body, Dumper=DUMPER, sort_keys=False, encoding="utf-8")
    with fresh.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        if before is None:
            renames.rename_to_new(fresh, path)
            return True
        return _holds(path, before) and _swap(fresh, text, path, before)
    except (FileExistsError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in renames.MISSING:
            raise
        fresh.rename(path)  # the last check was a moment ago
        return True
    finally:
        fresh.unlink(missing_ok=True)


def _swap(fresh: Path, text: bytes, path: Path, before: Json) -> bool:
    """Whether our text has replaced `before`. What else was there is put back; if that takes away
    a file that is newer still, that one is put back, until the file is the newest one again."""
    renames.exchange(fresh, path)
    if _holds(fresh, before):
        return True
    ours, taken = text, fresh.read_bytes()
    while True:
        renames.exchange(fresh, path)
        found = fresh.read_bytes()
        if found == ours:
            return False
        ours, taken = taken, found


def _holds(path: Path, body: Json) -> bool:
    try:
        return bool(_content(path) == body)
    except (yaml.YAMLError, ValueError):
        return False  # another process has written it


def _remove(path: Path, uid: str) -> None:
    """Remove the object with this UID, and no other one that has got its name."""
    taken = path.with_name(f".{path.name}.{os.getpid()}.removed")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return
    try:
        if uid and uid_of(_content(taken)) != uid:
            renames.rename_to_new(taken, path)
    except (FileExistsError, yaml.YAMLError, ValueError):
        pass  # a newer one is there, or this is not an object
    finally:
        taken.unlink(missing_ok=True)
