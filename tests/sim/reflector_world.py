"""An API server with a history that is compacted, and a reflector that copies its objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from taskd.core.clusterd.reflector import (
    Change,
    Json,
    ListPage,
    OpenWatch,
    Pause,
    Reflector,
    ReflectorConfig,
)

PAGE = 4
NAMES = [f"ns/pod-{number}" for number in range(9)]


@dataclass
class ApiServer:
    random: Random
    version: int = 1
    compacted: int = 0
    objects: dict[str, Json] = field(default_factory=dict)
    history: list[tuple[int, str, Json]] = field(default_factory=list)
    uids: int = 0
    lists: dict[str, tuple[list[Json], int]] = field(default_factory=dict)
    """Continued lists: what is left, and the version of the list."""

    def change_something(self) -> None:
        name = self.random.choice(NAMES)
        present = name in self.objects
        self.version += 1
        if not present:
            self.uids += 1
            self._put("ADDED", name, f"uid-{self.uids}")
        elif self.random.random() < 0.4:
            gone = self.objects.pop(name)
            self.history.append((self.version, "DELETED", self._with_version(gone)))
        else:
            self._put("MODIFIED", name, self.objects[name]["metadata"]["uid"])

    def compact(self) -> None:
        self.compacted = self.version
        self.lists.clear()

    def since(self, version: int) -> list[tuple[int, str, Json]]:
        return [entry for entry in self.history if entry[0] > version]

    def list_page(self, token: str) -> tuple[list[Json], str, str] | None:
        """(items, version, next token); None: the token has expired."""
        if token:
            if token not in self.lists:
                return None
            items, version = self.lists.pop(token)
        else:
            items, version = list(self.objects.values()), self.version
        page, rest = items[:PAGE], items[PAGE:]
        after = f"t{version}-{len(rest)}-{self.random.random()}" if rest else ""
        if after:
            self.lists[after] = (rest, version)
        return page, str(version), after

    def _put(self, kind: str, name: str, uid: str) -> None:
        namespace, _, short = name.partition("/")
        body = {
            "metadata": {
                "namespace": namespace,
                "name": short,
                "uid": uid,
                "resourceVersion": str(self.version),
            }
        }
        self.objects[name] = body
        self.history.append((self.version, kind, body))

    def _with_version(self, body: Json) -> Json:
        return {"metadata": {**body["metadata"], "resourceVersion": str(self.version)}}


class World:
    def __init__(self, seed: int, make: Callable[..., Reflector] = Reflector) -> None:
        self.random = Random(seed)
        self.server = ApiServer(self.random)
        self.now = 0.0
        self.config = ReflectorConfig(resync_s=60.0)
        self.reflector = make(self.config, self.random.random)
        self.copy: dict[str, Json] = {}
        self.longest_pause_s = 0.0
        self.requests = 0

    def run(self, *, until: float, trouble: float) -> None:
        """Follow the server, of whose answers a share fails in some way."""
        while self.now < until:
            match self.reflector.next_action(self.now):
                case Pause(wake):
                    self.longest_pause_s = max(self.longest_pause_s, wake - self.now)
                    self._pass_time(wake - self.now, trouble)
                case ListPage(token):
                    self.requests += 1
                    self._list(token, trouble)
                case OpenWatch(version):
                    self.requests += 1
                    self._watch(int(version), trouble)

    def _pass_time(self, seconds: float, trouble: float) -> None:
        self.now += seconds
        if trouble and self.random.random() < 0.8:
            for _ in range(self.random.randrange(4)):
                self.server.change_something()
            if self.random.random() < trouble:
                self.server.compact()

    def _list(self, token: str, trouble: float) -> None:
        self._pass_time(0.05, trouble)
        if self.random.random() < trouble:
            self.reflector.failed(self.random.choice([0, 429, 500, 403]), "broken", 0.0, self.now)
            return
        page = self.server.list_page(token)
        if page is None:
            self.reflector.failed(410, "expired", 0.0, self.now)
        else:
            self._apply(self.reflector.page(*page, self.now))

    def _watch(self, version: int, trouble: float) -> None:
        self.reflector.watch_opened()
        if version < self.server.compacted:
            body = {"kind": "Status", "code": 410, "message": "too old"}
            self._apply(self.reflector.event("ERROR", body, self.now))
            self.reflector.watch_ended(self.now)
            return
        for _ in range(self.random.randrange(1, 8)):
            self._pass_time(1.0, trouble)
            for at, kind, body in self.server.since(version):
                self._apply(self.reflector.event(kind, body, self.now))
                version = at
                if self.random.random() < trouble:
                    self.reflector.failed(0, "connection lost", 0.0, self.now)
                    return
            if self.random.random() < 0.3:
                version = self.server.version
                bookmark = {"metadata": {"resourceVersion": str(version)}}
                self._apply(self.reflector.event("BOOKMARK", bookmark, self.now))
        self.reflector.watch_ended(self.now)

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            if change.body is None:
                assert change.name in self.copy, "only what was there is reported as deleted"
                del self.copy[change.name]
                continue
            before = self.copy.get(change.name)
            if before is not None:
                same = before["metadata"]["uid"] == change.body["metadata"]["uid"]
                assert same, "a deletion in between was not reported"
            self.copy[change.name] = change.body
