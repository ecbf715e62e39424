"""Follows objects of the API server in a thread: list, watch, and again after any failure."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote, urlsplit

from tests.kubernetes.control_plane import ControlPlane, Json

AGAIN_S = 0.2


class Watcher:
    """Calls `changed(body, gone)` for every object at first, and then for every change."""

    def __init__(
        self,
        plane: ControlPlane,
        path: str,
        changed: Callable[[Json, bool], None],
        *,
        fields: str = "",
    ) -> None:
        self._plane, self._path, self._changed = plane, path, changed
        self._query = f"fieldSelector={quote(fields)}&" if fields else ""
        self._stop = threading.Event()
        self._connection: http.client.HTTPSConnection | None = None
        self._known: dict[str, Json] = {}
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        opened = None if self._connection is None else self._connection.sock
        if opened is not None:
            with suppress(OSError):
                opened.shutdown(2)
        if threading.current_thread() is not self._thread:
            self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(OSError, ValueError, http.client.HTTPException):
                self._follow()
            self._close()
            self._stop.wait(AGAIN_S)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _follow(self) -> None:
        listed = self._get(f"{self._path}?{self._query}")
        body = json.loads(listed.read())
        items = {item["metadata"]["uid"]: item for item in body["items"]}
        for uid in [uid for uid in self._known if uid not in items]:
            self._changed(self._known.pop(uid), True)
        for uid, item in items.items():
            self._known[uid] = item
            self._changed(item, False)
        version = body["metadata"]["resourceVersion"]
        watch = self._get(f"{self._path}?{self._query}watch=true&resourceVersion={version}")
        while not self._stop.is_set() and (line := watch.readline()):
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            item = event["object"]
            uid, gone = item["metadata"]["uid"], event["type"] == "DELETED"
            self._known[uid] = item
            if gone:
                del self._known[uid]
            self._changed(item, gone)

    def _get(self, path: str) -> http.client.HTTPResponse:
        self._close()
        context = ssl.create_default_context(cafile=str(self._plane.ca))
        self._connection = http.client.HTTPSConnection(
            urlsplit(self._plane.url).netloc, context=context, timeout=300
        )
        headers = {"Authorization": f"Bearer {self._plane.token}"}
        self._connection.request("GET", f"/{path}", headers=headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return answer
