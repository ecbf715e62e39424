"""Carries state between two ranks over a TCP connection of its own, at the speed of the link.

Not over the groups: a gloo that loses its peer in the middle of a message does not come back (see
`works.py`), and a large state is always in the middle of one. The giver says in the store where it
waits and under which secret; the meeting cuts both ends when the incident is over.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taskd.errors import PeerRefused, PeerUnreachable, TaskdError
from taskd.torch.groups.store import Meeting

SECRET_BYTES, WANTED_BYTES = 32, 160

Send = Callable[[memoryview], None]
Receive = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a taker asks a giver for: a shard, or one lot of it where several give."""

    shard: str
    givers: int = 1
    lot: int = 0

    def __str__(self) -> str:
        return f"{self.lot} {self.givers} {self.shard}"

    @staticmethod
    def read(text: str) -> Wanted:
        lot, givers, shard = text.split(" ", 2)
        return Wanted(shard, int(givers), int(lot))


Write = Callable[[Wanted, Send], None]


def give(meeting: Meeting, rank: int, takers: Sequence[int], write: Write) -> None:
    """Serve each of the takers once, side by side, and return when all have everything."""
    secret = secrets.token_bytes(SECRET_BYTES)
    door = meeting.guard(socket.create_server((meeting.my_host(), 0), backlog=len(takers)))
    with door:
        door.settimeout(meeting.timeout.total_seconds())
        host, port = door.getsockname()[:2]
        meeting.store.set(f"state/{rank}", f"{host} {port} {secret.hex()}")
        problems: list[str] = []
        threads = []
        for _ in takers:
            try:
                guest, _ = door.accept()
            except OSError as error:
                raise PeerUnreachable(f"nobody came for the state: {error}") from error
            # Many tensors are small: none of them is to wait for the next.
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.settimeout(meeting.timeout.total_seconds())
            meeting.guard(guest)
            serve = threading.Thread(target=_serve, args=(guest, secret, write, problems))
            serve.start()
            threads.append(serve)
        for thread in threads:
            thread.join()
    if problems:
        raise PeerUnreachable("; ".join(problems))


def _serve(guest: socket.socket, secret: bytes, write: Write, problems: list[str]) -> None:
    try:
        with guest:
            told = bytearray(SECRET_BYTES + WANTED_BYTES)
            _read(guest, memoryview(told))
            if not secrets.compare_digest(told[:SECRET_BYTES], secret):
                raise PeerRefused("a stranger asked for the state")
            write(Wanted.read(told[SECRET_BYTES:].rstrip(b"\0").decode()), guest.sendall)
            _read(guest, memoryview(bytearray(1)))  # the taker has it all
    except (OSError, TaskdError) as error:
        problems.append(f"a taker was not served: {error}")


def take(meeting: Meeting, source: int, wanted: Wanted, read: Callable[[Receive], None]) -> None:
    """Ask the giver, and tell it when everything has come."""
    host, port, secret = meeting.store.get(f"state/{source}").decode().split()
    try:
        with socket.create_connection((host, int(port)), meeting.timeout.total_seconds()) as link:
            meeting.guard(link)
            link.sendall(bytes.fromhex(secret) + str(wanted).encode().ljust(WANTED_BYTES, b"\0"))
            read(lambda place: _read(link, place))
            link.sendall(b"!")
    except OSError as error:
        raise PeerUnreachable(f"rank {source}, which gave the state, was lost: {error}") from error


def _read(link: socket.socket, place: memoryview) -> None:
    """Fill the whole place."""
    place = place.cast("B")
    while place.nbytes:
        got = link.recv_into(place)
        if not got:
            raise PeerUnreachable("the connection was closed in the middle")
        place = place[got:]
