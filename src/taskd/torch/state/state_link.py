"""Carries state between two ranks over a separate TCP connection, at the speed of the link.

Not over the groups: a gloo that loses its peer in the middle of a message does not return (see
`works.py`), and a large state is always in the middle of one. The sender publishes its address and
a secret in the store; the rendezvous aborts both ends when the incident is over.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taskd.errors import PeerRefused, PeerUnreachable, TaskdError
from taskd.torch.groups.store import Rendezvous

SECRET_BYTES, REQUEST_BYTES = 32, 160

Send = Callable[[memoryview], None]
Receive = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What a receiver asks a sender for: a shard, or one share of it where several send."""

    shard: str
    senders: int = 1
    share: int = 0

    def __str__(self) -> str:
        return f"{self.share} {self.senders} {self.shard}"

    @staticmethod
    def parse(text: str) -> StateRequest:
        share, senders, shard = text.split(" ", 2)
        return StateRequest(shard, int(senders), int(share))


Write = Callable[[StateRequest, Send], None]


def serve(rendezvous: Rendezvous, rank: int, receivers: Sequence[int], write: Write) -> None:
    """Serve each receiver once, in parallel, and return when all have everything."""
    secret = secrets.token_bytes(SECRET_BYTES)
    server = rendezvous.track(
        socket.create_server((rendezvous.local_host(), 0), backlog=len(receivers))
    )
    with server:
        server.settimeout(rendezvous.timeout.total_seconds())
        host, port = server.getsockname()[:2]
        rendezvous.store.set(f"state/{rank}", f"{host} {port} {secret.hex()}")
        problems: list[str] = []
        threads = []
        for _ in receivers:
            try:
                connection, _ = server.accept()
            except OSError as error:
                raise PeerUnreachable(f"no receiver connected for the state: {error}") from error
            # Many tensors are small: none of them may wait for the next.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(rendezvous.timeout.total_seconds())
            rendezvous.track(connection)
            thread = threading.Thread(target=_serve_one, args=(connection, secret, write, problems))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
    if problems:
        raise PeerUnreachable("; ".join(problems))


def _serve_one(connection: socket.socket, secret: bytes, write: Write, problems: list[str]) -> None:
    try:
        with connection:
            request = bytearray(SECRET_BYTES + REQUEST_BYTES)
            _read(connection, memoryview(request))
            if not secrets.compare_digest(request[:SECRET_BYTES], secret):
                raise PeerRefused("a process with a wrong secret asked for the state")
            text = request[SECRET_BYTES:].rstrip(b"\0").decode()
            write(StateRequest.parse(text), connection.sendall)
            _read(connection, memoryview(bytearray(1)))  # the receiver has everything
    except (OSError, TaskdError) as error:
        problems.append(f"a receiver did not get the state: {error}")


def fetch(
    rendezvous: Rendezvous, source: int, request: StateRequest, read: Callable[[Receive], None]
) -> None:
    """Ask the sender, and tell it when everything has arrived."""
    host, port, secret = rendezvous.store.get(f"state/{source}").decode().split()
    limit_s = rendezvous.timeout.total_seconds()
    try:
        with socket.create_connection((host, int(port)), limit_s) as connection:
            rendezvous.track(connection)
            text = str(request).encode().ljust(REQUEST_BYTES, b"\0")
            connection.sendall(bytes.fromhex(secret) + text)
            read(lambda target: _read(connection, target))
            connection.sendall(b"!")
    except OSError as error:
        raise PeerUnreachable(f"lost rank {source} while it sent the state: {error}") from error


def _read(connection: socket.socket, target: memoryview) -> None:
    """Fill the whole target."""
    target = target.cast("B")
    while target.nbytes:
        got = connection.recv_into(target)
        if not got:
            raise PeerUnreachable("the peer closed the connection before everything was sent")
        target = target[got:]
