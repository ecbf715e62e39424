"""Keeps a copy of one kind of objects in step with an API server. Pure, without I/O.

List all objects page by page, then watch from the version of that list. Whenever the watch cannot
continue (410 Gone: the server no longer has the changes since our version), list again and compare:
objects that have gone in between are reported as deleted, and an object that was deleted and
created again under the same name as both. Failures are repeated with growing pauses; what is known
stays known meanwhile. A watch that fails again and again is replaced by lists: whatever is wrong
with it, the copy is at most one pause old.

`clusterd/kubernetes/reflect.py` asks `next_action` what to do, does it, and tells the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

Json = dict[str, Any]

GONE, NOT_FOUND, TOO_MANY = 410, 404, 429
BOOKMARK, ERROR, DELETED = "BOOKMARK", "ERROR", "DELETED"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReflectorConfig:
    first_pause_s: float = 0.25
    """The pause after the first failure; each further one doubles it."""
    longest_pause_s: float = 30.0
    """No pause is longer, unless the server asks for it."""
    resync_s: float = 1800.0
    """How often to list everything again although the watch works."""
    short_watch_s: float = 1.0
    """A watch that ends sooner and without a change counts as a failure."""
    watch_tries: int = 4
    """After so many failures in a row everything is listed again."""


@dataclass(frozen=True, slots=True)
class ListPage:
    token: str
    """Continues a list; empty: begin one."""


@dataclass(frozen=True, slots=True)
class OpenWatch:
    version: str


@dataclass(frozen=True, slots=True)
class Pause:
    until: float


Action = ListPage | OpenWatch | Pause


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    """namespace/name"""
    body: Json | None
    """None: deleted."""


class Reflector:
    def __init__(self, config: ReflectorConfig, jitter: Callable[[], float]) -> None:
        """`jitter` gives numbers from 0 to 1: many clients must not return all at once."""
        self._config, self._jitter = config, jitter
        self.synced = False
        """Everything has been listed once, or the server does not know this kind of objects."""
        self.problem = ""
        """Why the copy may be out of date; empty: it is not."""
        self.lists = 0
        """How many complete lists were made."""
        self._uids: dict[str, str] = {}
        self._version = ""
        self._token = ""
        self._listed: dict[str, Json] | None = {}
        """Of the list in progress; None: watching."""
        self._failures = 0
        self._not_before = -inf
        self._resync_at = inf
        self._opened_at = -inf
        self._heard = False

    def next_action(self, now: float) -> Action:
        if now < self._not_before:
            return Pause(self._not_before)
        if self._listed is None and now >= self._resync_at:
            self._list_again()
        if self._listed is not None:
            return ListPage(self._token)
        self._opened_at, self._heard = now, False
        return OpenWatch(self._version)

    def page(self, items: Iterable[Json], version: str, token: str, now: float) -> list[Change]:
        """One page of a list has arrived. The changes come with the last one."""
        if self._listed is None:
            return []
        self._listed |= {_name(item): item for item in items}
        self._token = token
        if token:
            return []
        listed, self._listed = self._listed, None
        self._version = version
        self.lists += 1
        self._resync_at = now + self._config.resync_s
        self.synced = True
        if self._failures < self._config.watch_tries:
            self.problem = ""
        gone = [Change(name, None) for name in self._uids if name not in listed]
        for change in gone:
            del self._uids[change.name]
        return gone + [
            change for name, body in listed.items() for change in self._there(name, body)
        ]

    def watch_opened(self) -> None:
        """The server has accepted the watch; its changes follow."""
        self.problem = ""

    def event(self, kind: str, body: Json, now: float) -> list[Change]:
        """One line of the watch has arrived."""
        if self._listed is not None:
            return []
        if kind == ERROR:
            self.failed(_code(body), str(body.get("message", "")), 0.0, now)
            return []
        self._heard = True
        self._version = _metadata(body).get("resourceVersion", "") or self._version
        if kind == BOOKMARK:
            return []
        name = _name(body)
        if kind == DELETED:
            return [Change(name, None)] if self._uids.pop(name, None) is not None else []
        return list(self._there(name, body))

    def watch_ended(self, now: float) -> None:
        """The server has closed the watch, as it does from time to time."""
        if self._listed is not None or self._not_before > now:
            return  # the reason has come before the end
        if not self._watched(now):
            self.failed(0, "the watch ended at once", 0.0, now)

    def failed(self, code: int, message: str, retry_after_s: float, now: float) -> None:
        """A request has failed. Code 0: the server was not reached, or answered with nonsense."""
        self._failures = 1 if self._listed is None and self._watched(now) else self._failures + 1
        if code == GONE:
            self._list_again()
            if self._failures == 1:
                return  # the usual case: the list follows at once
        elif code == NOT_FOUND and self._listed is not None:
            self.synced = True  # nothing can be listed, so nothing is missing
        self.problem = message or f"status {code}"
        longest = min(
            self._config.first_pause_s * 2.0 ** min(self._failures - 1, 20),
            self._config.longest_pause_s,
        )
        pause_s = max(longest * (0.5 + 0.5 * self._jitter()), retry_after_s)
        self._not_before = now + pause_s
        often = self._failures >= self._config.watch_tries and code != TOO_MANY
        if self._listed is not None or often:
            self._list_again()

    def _list_again(self) -> None:
        self._listed, self._token = {}, ""

    def _watched(self, now: float) -> bool:
        """The watch has worked for a while: the failures before it are history.

        A list alone is no such proof: a server may answer every watch with 410.
        """
        return self._heard or now - self._opened_at >= self._config.short_watch_s

    def _there(self, name: str, body: Json) -> Iterable[Change]:
        uid = str(_metadata(body).get("uid", ""))
        known = self._uids.get(name)
        self._uids[name] = uid
        if known is not None and known != uid:
            yield Change(name, None)
        yield Change(name, body)


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    found = body.get("metadata")
    return found if isinstance(found, Mapping) else {}


def _name(body: Mapping[str, Any]) -> str:
    metadata = _metadata(body)
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def _code(body: Mapping[str, Any]) -> int:
    code = body.get("code")
    return code if isinstance(code, int) else 0
