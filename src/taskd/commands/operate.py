"""What `taskd stress` and `taskd nic` share: ask for an operation, wait, say how it went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taskd.commands.connection import TIMEOUT_S, Connection
from taskd.errors import PeerRefused
from taskd.model.codes import RecoverCode
from taskd.runtime.tokens import bearer

WAIT_S = 2 * 15 * 60.0
"""Longer than clusterd itself waits."""


def ask(server: Connection, method: str, request: Any) -> None:
    """Raises PeerRefused, with clusterd's code and sentence, unless the operation has begun."""
    answer = getattr(server.recover, method)(
        request, timeout=TIMEOUT_S, metadata=bearer(server.place.token)
    )
    if answer.code != RecoverCode.OK:
        raise PeerRefused(f"{answer.code}: {answer.info}")


def outcome(server: Connection, method: str, request: Any) -> str:
    """The one sentence with which clusterd ends the operation."""
    stream: Iterator[Any] = getattr(server.recover, method)(
        request, timeout=WAIT_S, metadata=bearer(server.place.token)
    )
    for told in stream:
        return str(told.msg)
    raise PeerRefused("clusterd has said nothing about the end of the operation")
