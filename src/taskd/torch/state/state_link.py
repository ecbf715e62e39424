"""Carries state between two ranks over a separate connection, at the speed of the link.

Not over the groups: a gloo that loses its peer in the middle of a message does not return (see
`works.py`), and a large state is always in the middle of one. The sender publishes its address and
a random number in the store; the rendezvous aborts both ends when the incident is over.

Any process can read and write torch's store. So the receiver proves with the job's key that it may
have the state, and the sender that the first bytes, which name all that follow, are its answer to
this request: an older answer, one of another incident or one of another rank is refused.

Two ranks of one machine use a Unix socket where they can (`local_link.py`). Nothing can be between
them, so what arrives after the sender's proof needs neither digests nor encryption.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from taskd.config import load
from taskd.errors import PeerRefused, PeerUnreachable, TaskdError
from taskd.runtime.clock import monotonic
from taskd.runtime.limits.waiting_connections import MOST_WAITING, WaitingConnections, shut_down
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import local_link
from taskd.torch.state.link_encryption import Decrypter, Encrypter
from taskd.torch.state.sealed import DIGEST, BadState, key_for, sign
from taskd.worker.settings import WorkerSettings

NUMBER_BYTES, REQUEST_BYTES = 32, 160
FIRST_BYTES = 8 + DIGEST
"""Of an image: the length of its manifest and the manifest's seal, which covers everything else."""

Send = Callable[[memoryview], None]
Receive = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What a receiver asks a sender for: a shard, or one share of it where several send."""

    shard: str
    senders: int = 1
    share: int = 0
    is_local: bool = False
    """It has come over a local connection. Not sent: the sender sees it."""

    def __str__(self) -> str:
        return f"{self.share} {self.senders} {self.shard}"

    @staticmethod
    def parse(text: str, is_local: bool) -> StateRequest:
        share, senders, shard = text.split(" ", 2)
        return StateRequest(shard, int(senders), int(share), is_local)


Write = Callable[[StateRequest, Send], None]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request and its answer, in this incident of this job. Both ends know all of it."""

    place: str
    offered: bytes
    """The random number of the sender, from the store."""
    asked: bytes
    """That of the receiver."""
    request: bytes
    encrypted: bool
    """As the job is configured. Nothing is encrypted over a local connection."""
    ends: bytes = b""
    """The two processes, as the kernel names them to both; empty: it is not a local connection."""

    def receiver_proof(self) -> bytes:
        return sign(self._content(), f"request for state: {self.place}")

    def sender_proof(self, first_bytes: bytes) -> bytes:
        return sign(self._content() + first_bytes, f"answer with state: {self.place}")

    def key(self) -> bytes:
        """Of this conversation only."""
        return key_for(f"encrypted state: {self.place} {self._content().hex()}")

    def _content(self) -> bytes:
        fixed = self.offered + self.asked + bytes([self.encrypted, len(self.ends)])
        return fixed + self.ends + self.request


def serve(rendezvous: Rendezvous, rank: int, receivers: Sequence[int], write: Write) -> None:
    """Serve each receiver once, in parallel, and return when all have everything.

    Connections without the job's key are refused, and take the place of no receiver.
    """
    place, offered = _place(rendezvous, rank), secrets.token_bytes(NUMBER_BYTES)
    limit_s = rendezvous.timeout.total_seconds()
    deadline, threads = monotonic() + limit_s, []
    with ExitStack() as stack:
        server = socket.create_server((rendezvous.local_host(), 0), backlog=MOST_WAITING)
        local = stack.enter_context(
            local_link.listening(local_folder(), _meeting_point(place, offered))
        )
        listening = [stack.enter_context(server), *([local] if local else [])]
        sender = _Sender(listening, place, offered, len(receivers), write)
        selector = stack.enter_context(selectors.DefaultSelector())
        for one in listening:
            one.setblocking(False)
            selector.register(rendezvous.track(one), selectors.EVENT_READ, one)
        host, port = server.getsockname()[:2]
        rendezvous.store.set(f"state/{rank}", f"{host} {port} {offered.hex()}")
        while sender.awaited:
            try:
                connection = _accept(selector, deadline)
            except OSError as error:
                if not sender.awaited:
                    break
                raise PeerUnreachable(
                    f"no receiver connected for the state: {sender.refused or error}"
                ) from error
            if connection is None:
                continue
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, local_link.BUFFER_BYTES)
            else:
                # Many tensors are small: none of them may wait for the next.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(limit_s)
            rendezvous.track(connection)
            sender.unproven.add(connection)
            threads.append(threading.Thread(target=sender.answer, args=(connection,)))
            threads[-1].start()
        sender.unproven.drop_all()
        for thread in threads:
            thread.join()
    if sender.problems:
        raise PeerUnreachable("; ".join(sender.problems))


def _accept(selector: selectors.BaseSelector, deadline: float) -> socket.socket | None:
    """The next connection. None: the caller has gone again, or a local socket was shut down.

    Raises:
        OSError: None came in time, or the TCP socket was shut down.
    """
    ready = selector.select(max(deadline - monotonic(), 0.001))
    if not ready:
        raise TimeoutError("timed out")
    for key, _ in ready:
        with suppress(BlockingIOError):
            accepted: socket.socket = key.data.accept()[0]
            return accepted
    return None


class _Sender:
    """Answers connections until as many receivers as expected have proved that they may ask."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        place: str,
        offered: bytes,
        receivers: int,
        write: Write,
    ) -> None:
        self._listening, self._place, self._write = listening, place, write
        self._offered = offered
        self.awaited = receivers
        """How many receivers have not come yet."""
        self.refused = ""
        """Why the last stranger was refused."""
        self.problems: list[str] = []
        self.unproven = WaitingConnections()
        self._asked: set[bytes] = set()
        self._lock = threading.Lock()

    def answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                talk = self._proven(connection)
            except (OSError, TaskdError) as error:
                self.unproven.remove(connection)
                self.refused = str(error)
                return
            try:
                _answer(connection, talk, self._write)
                _read(connection, memoryview(bytearray(1)))  # the receiver has everything
            except (OSError, TaskdError) as error:
                self.problems.append(f"a receiver did not get the state: {error}")

    def _proven(self, connection: socket.socket) -> Conversation:
        ends = b""
        if connection.family == socket.AF_UNIX:
            if not local_link.is_same_user(connection):
                raise PeerRefused("the state was requested by another user of this machine")
            ends = local_link.both_ends(connection, listens=True)
        received = bytearray(NUMBER_BYTES + REQUEST_BYTES + DIGEST)
        _read(connection, memoryview(received))
        asked, rest = bytes(received[:NUMBER_BYTES]), bytes(received[NUMBER_BYTES:])
        text, proof = rest[:REQUEST_BYTES], rest[REQUEST_BYTES:]
        talk = Conversation(self._place, self._offered, asked, text, is_encrypted(), ends)
        if not secrets.compare_digest(proof, talk.receiver_proof()):
            raise PeerRefused(
                "the state was requested without the job's key, for another incident, or by a "
                "node with another --encrypt-state"
            )
        with self._lock:
            if asked in self._asked or not self.awaited:
                raise PeerRefused("the same request has come twice")
            self._asked.add(asked)
            self.unproven.remove(connection)  # before the wait ends: the rest is dropped then
            self.awaited -= 1
            if not self.awaited:
                for one in self._listening:
                    shut_down(one)  # ends the wait for further connections
        return talk


def _answer(connection: socket.socket, talk: Conversation, write: Write) -> None:
    request = StateRequest.parse(talk.request.rstrip(b"\0").decode(), bool(talk.ends))
    if request.is_local:
        connection.sendall(talk.sender_proof(b""))
        write(request, connection.sendall)
        return
    encrypter = Encrypter(talk.key(), connection.sendall) if talk.encrypted else None
    send: Send = connection.sendall if encrypter is None else encrypter.send
    is_proven = request.share > 0  # what the manifest of the first share covers

    def prove_and_send(data: memoryview) -> None:
        nonlocal is_proven
        if not is_proven:
            send(memoryview(talk.sender_proof(bytes(data.cast("B")[:FIRST_BYTES]))))
            is_proven = True
        send(data)

    write(request, prove_and_send)
    if encrypter is not None:
        encrypter.flush()


Local = Mapping[int, socket.socket]
"""Local connections to senders, by rank."""


@contextmanager
def local_connections(rendezvous: Rendezvous, sources: Sequence[int]) -> Iterator[Local]:
    """To each of these ranks, or none at all: a state needs digests if any part of it does.

    They are the last word on which ranks are local: neither the store nor a manifest has a say.
    """
    found: dict[int, socket.socket] = {}
    limit_s = rendezvous.timeout.total_seconds()
    with ExitStack() as stack:
        for source in sources:
            point = _meeting_point(_place(rendezvous, source), _offer(rendezvous, source)[2])
            connection = local_link.connect(local_folder(), point, limit_s)
            if connection is None:
                stack.close()
                found = {}
                break
            found[source] = stack.enter_context(rendezvous.track(connection))
        yield found


def fetch(
    rendezvous: Rendezvous,
    source: int,
    request: StateRequest,
    read: Callable[[Receive], None],
    local: socket.socket | None = None,
) -> None:
    """Ask the sender, and tell it when everything has arrived. Over TCP, or a local connection."""
    host, port, offered = _offer(rendezvous, source)
    limit_s = rendezvous.timeout.total_seconds()
    talk = Conversation(
        _place(rendezvous, source),
        offered,
        secrets.token_bytes(NUMBER_BYTES),
        str(request).encode().ljust(REQUEST_BYTES, b"\0"),
        is_encrypted(),
        b"" if local is None else local_link.both_ends(local, listens=False),
    )
    try:
        with local or socket.create_connection((host, port), limit_s) as connection:
            rendezvous.track(connection)
            connection.sendall(talk.asked + talk.request + talk.receiver_proof())
            receive: Receive = lambda target: _read(connection, target)  # noqa: E731
            if talk.ends:
                proof = bytearray(DIGEST)
                receive(memoryview(proof))
                _check(talk, proof, b"")
            elif talk.encrypted:
                receive = Decrypter(talk.key(), receive).receive
            read(receive if talk.ends or request.share else _proven(talk, receive))
            connection.sendall(b"!")
    except OSError as error:
        raise PeerUnreachable(f"lost rank {source} while it sent the state: {error}") from error


def _offer(rendezvous: Rendezvous, source: int) -> tuple[str, int, bytes]:
    """Where that rank sends its state over TCP, and its random number."""
    published = rendezvous.store.get(f"state/{source}")
    try:
        host, port, offered = published.decode().split()
        return host, int(port), bytes.fromhex(offered)
    except ValueError as error:
        raise BadState(f"invalid address of rank {source} in the store: {published!r}") from error


def _proven(talk: Conversation, receive: Receive) -> Receive:
    """The same, once the first bytes are known to be the answer to this request."""
    proof, first = bytearray(DIGEST), bytearray(FIRST_BYTES)
    receive(memoryview(proof))
    receive(memoryview(first))
    _check(talk, proof, bytes(first))
    left = memoryview(first)

    def receive_rest(target: memoryview) -> None:
        nonlocal left
        target = target.cast("B")
        size = min(target.nbytes, left.nbytes)
        target[:size] = left[:size]
        left = left[size:]
        if target.nbytes > size:
            receive(target[size:])

    return receive_rest


def _check(talk: Conversation, proof: bytearray, first_bytes: bytes) -> None:
    if not secrets.compare_digest(proof, talk.sender_proof(first_bytes)):
        raise BadState("the state is not the answer to this request: it is older, or forged")


@cache
def is_encrypted() -> bool:
    """Whether the job encrypts the state that its ranks send each other."""
    return load(WorkerSettings).encrypt_state


@cache
def local_folder() -> Path | None:
    """The node's folder in shared memory, where its ranks can meet."""
    beacon = load(WorkerSettings).beacon
    return Path(beacon).parent if beacon else None


def _meeting_point(place: str, offered: bytes) -> bytes:
    return f"{place} ".encode() + offered


def _place(rendezvous: Rendezvous, source: int) -> str:
    return f"rank {source} at {rendezvous.prefix}"


def _read(connection: socket.socket, target: memoryview) -> None:
    """Fill the whole target."""
    target = target.cast("B")
    while target.nbytes:
        got = connection.recv_into(target)
        if not got:
            raise PeerUnreachable("the peer closed the connection before everything was sent")
        target = target[got:]
