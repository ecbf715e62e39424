"""What the agent and its zygote write to each other: one JSON object a packet, and open files.

`processes.py` is the agent's end, `zygote.py` the other. The socket keeps packets whole and in
order, so there is no framing. The base environment and the program are known to the zygote from
its own start; a letter only carries what differs from one worker to the next.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass, field

MAX_BYTES = 128 * 1024
"""Larger environments than this do not fit into one packet of a default kernel."""

MAX_FILES = 4

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a forked worker write the stacks of all its threads to its stack file."""


@dataclass(frozen=True, slots=True)
class Start:
    """Fork a worker. With the letter come its stdout and stderr."""

    id: int
    name: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Fork an understudy. With the letter comes a pipe, where it waits for its `Start`."""

    id: int
    sibling: int
    """The pid of a rank whose memory shows what it will need; 0: there is none."""


@dataclass(frozen=True, slots=True)
class ServeStore:
    """Fork a process that serves torch's TCPStore on the listening socket in the letter."""

    id: int
    host: str
    port: int
    renewed: bool
    """Whether it takes the place of another, whose keys it does not have."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent ends in good order, and will remove its folders itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The zygote has imported everything; `failed` names what it could not, and why."""

    modules: list[str]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """With the letter comes a pidfd."""

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


Letter = Start | Rehearse | ServeStore | Leave | Ready | Started | Refused | Exited
_KINDS: dict[str, type[Letter]] = {
    kind.__name__: kind
    for kind in (Start, Rehearse, ServeStore, Leave, Ready, Started, Refused, Exited)
}


def write(pipe: socket.socket, letter: Letter, files: tuple[int, ...] = ()) -> None:
    packet = json.dumps({"kind": type(letter).__name__, **asdict(letter)}).encode()
    if len(packet) > MAX_BYTES:
        raise ValueError(f"a letter of {len(packet)} bytes is too long: shorten the environment")
    if files:
        socket.send_fds(pipe, [packet], list(files))
    else:
        pipe.send(packet)


def read(pipe: socket.socket) -> tuple[Letter, tuple[int, ...]] | None:
    """The next letter and its files, or None when the other end is gone."""
    try:
        packet, files, _, _ = socket.recv_fds(pipe, MAX_BYTES, MAX_FILES)
    except ConnectionResetError:
        return None
    if not packet:
        return None
    for file in files:
        os.set_inheritable(file, False)
    fields = json.loads(packet)
    return _KINDS[fields.pop("kind")](**fields), tuple(files)
