"""The messages between an agent and its zygote: one JSON object per packet, with open files.

`worker_processes.py` is the agent's end, `zygote.py` the other. The socket keeps packets whole and
in order, so there is no framing. The zygote knows the base environment and the program from its
own start; a message only carries what differs from worker to worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass, field
from typing import get_args

from taskd.wire.json_reading import loads

MAX_BYTES = 128 * 1024
"""A larger message does not fit into one packet with the kernel's default settings."""

MAX_FILES = 4

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a forked worker write the stacks of all its threads to its stack file."""


@dataclass(frozen=True, slots=True)
class Start:
    """Fork a worker. Files: its stdout and stderr."""

    id: int
    name: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartStandby:
    """Fork a standby process, which warms up. File: a socket where it then waits for `Start`."""

    id: int
    sibling: int
    """The pid of a rank whose memory shows which pages the standby will need; 0: no such rank."""
    reports: list[str] = field(default_factory=list)
    """Where the node's ranks write which devices they see (`worker/visible_devices.py`)."""


@dataclass(frozen=True, slots=True)
class ServeStore:
    """Fork a process that serves torch's TCPStore. File: the listening socket."""

    id: int
    host: str
    port: int
    renewed: bool
    """Whether it replaces another store, whose keys it does not have."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent exits in an orderly way and will remove its folders itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """All modules are imported; `failed` maps each that could not be imported to the reason."""

    modules: list[str]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """File: a pidfd of the new process."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    id: int
    because: str


@dataclass(frozen=True, slots=True)
class Exited:
    id: int
    pid: int
    exit_code: int | None
    signal: int | None


Message = Start | StartStandby | ServeStore | Leave | Ready | Started | Refused | Exited
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


class BadMessage(Exception):
    """The packet is not one of these messages."""


def write(connection: socket.socket, message: Message, files: tuple[int, ...] = ()) -> None:
    packet = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if len(packet) > MAX_BYTES:
        raise ValueError(
            f"the message {type(message).__name__} has {len(packet)} bytes, more than the "
            f"{MAX_BYTES} that fit into one packet: shorten the environment variables"
        )
    if files:
        socket.send_fds(connection, [packet], list(files))
    else:
        connection.send(packet)


def read(connection: socket.socket) -> tuple[Message, tuple[int, ...]] | None:
    """The next message and its files, or None when the other end is closed."""
    try:
        packet, files, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_FILES)
    except ConnectionResetError:
        return None
    if not packet:
        return None
    for file in files:
        os.set_inheritable(file, False)
    try:
        fields = loads(packet)
        return _KINDS[fields.pop("kind")](**fields), tuple(files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        for file in files:
            os.close(file)
        raise BadMessage(f"a packet of {len(packet)} bytes is not a message: {error}") from error
