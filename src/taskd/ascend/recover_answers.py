"""Which signal a report answers, and what the answer was, in case the server asks again.

clusterd names every signal by a uuid and repeats one that it has no answer to, after either side
has lost the connection. An order must be carried out once, but its answer may have to be sent
twice. Used by `ascend/recover_client.py` only.
"""

from __future__ import annotations

import threading
from typing import Any

from taskd.wire._pb import recover_pb2 as pb

ANSWERED_BY = {
    "stop_train": "ReportStopComplete",
    "pause_train": "ReportStopComplete",
    "on_global_rank": "ReportRecoverStrategy",
    "change_strategy": "ReportRecoverStatus",
    "save_and_exit": "ReportRecoverStatus",
}
REMEMBERED = 256
"""How many signals back a repetition is recognised."""


class Answers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int], None] = {}
        self._expected: dict[str, str] = {}
        self._given: dict[tuple[str, str], Any] = {}

    def is_repeated(self, signal: pb.ProcessManageSignal) -> bool:
        """Only servers that number their signals repeat them; Ascend's does not."""
        with self._lock:
            return bool(signal.sequence) and (signal.uuid, signal.sequence) in self._seen

    def expect(self, signal: pb.ProcessManageSignal) -> None:
        """From now on, reports of the kinds that this signal asks for carry its uuid."""
        with self._lock:
            _remember(self._seen, (signal.uuid, signal.sequence), None)
            for method in _methods(signal):
                self._expected[method] = signal.uuid
                self._given.pop((method, signal.uuid), None)

    def uuid_for(self, method: str) -> str:
        with self._lock:
            return self._expected.get(method, "")

    def remember(self, method: str, request: Any) -> None:
        with self._lock:
            _remember(self._given, (method, request.uuid), request)

    def given(self, signal: pb.ProcessManageSignal) -> list[tuple[str, Any]]:
        with self._lock:
            answers = ((name, self._given.get((name, signal.uuid))) for name in _methods(signal))
            return [(name, answer) for name, answer in answers if answer is not None]


def _methods(signal: pb.ProcessManageSignal) -> list[str]:
    named = (ANSWERED_BY.get(action) for action in signal.actions)
    return list(dict.fromkeys(name for name in named if name))


def _remember(table: dict[Any, Any], key: object, value: object) -> None:
    table[key] = value
    while len(table) > REMEMBERED:
        del table[next(iter(table))]
