"""A second copy of each snapshot on another node: a lost node takes its shared memory along.

Each rank keeps copies for others and sends its own to a rank on another node, its buddy
(`copy_placement.py` says which ranks to try first). The addresses are in the store of
the current rendezvous, which any process can read and write: both ends prove with the job's key
that they belong to the job, each for random numbers of the other, before a byte of the copy is
sent. The copies themselves are sealed. Sending follows the local copy in the same thread, so it
costs training nothing but bandwidth.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from taskd import config
from taskd.core.manager.repair import copy_placement as placement
from taskd.runtime.limits.waiting_connections import WaitingConnections
from taskd.torch.copies import snapshot_file, snapshots
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state.link_encryption import Decrypter, Encrypter
from taskd.torch.state.sealed import DIGEST, BadState, key_for, sign
from taskd.torch.state.state_link import is_encrypted

log = logging.getLogger(__name__)

NUMBER_BYTES = 16
_HEADER = struct.Struct("<16sQQ16s?")
"""Random numbers of the receiver and the sender, and between them the rank and the length of the
file that follows; whether it is encrypted."""
PLACE = "copy of a snapshot for another node"
WANTED, KEPT = f"{PLACE}: wanted", f"{PLACE}: kept"
"""What the receiver signs before the file is sent, and when it has dealt with it."""
TIMEOUT_S = 30.0
CHUNK = 1 << 20


class Buddy:
    """Keeps copies of other ranks in this node's memory, and sends ours to another node."""

    def __init__(self, folder: Path, rank: int, node: int) -> None:
        self._folder, self._rank, self._node = folder, rank, node
        self._server: socket.socket | None = None
        self._target: tuple[str, int] | None = None
        self._unproven = WaitingConnections()
        self._distrusted: frozenset[int] = frozenset()

    def announce(self, rendezvous: Rendezvous) -> None:
        """Publish our address, at each rendezvous again: other ranks may have joined."""
        self._distrusted = frozenset()
        if self._server is None:
            self._server = socket.create_server((rendezvous.local_host(), 0))
            threading.Thread(
                target=self._accept, args=(self._server,), name="taskd-buddy", daemon=True
            ).start()
        host, port = self._server.getsockname()[:2]
        rendezvous.store.set(f"buddy/{self._rank}", f"{self._node} {host} {port}")

    def choose(self, rendezvous: Rendezvous, ranks: list[int]) -> bool:
        """Choose where our copies go, among all that have announced. False: no other node."""
        per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._target = None
        for rank in placement.buddy_candidates(self._rank, ranks, per_node):
            node, host, port = rendezvous.store.get(f"buddy/{rank}").decode().split()
            if int(node) != self._node:
                self._target = host, int(port)
                return True
        return False

    def send(self, path: Path) -> None:
        """Send a copy of this file. If it fails, the next snapshot tries again."""
        if self._target is None:
            return
        try:
            with (
                path.open("rb") as file,
                socket.create_connection(self._target, TIMEOUT_S) as connection,
            ):
                length = path.stat().st_size
                number = _read_exactly(connection, NUMBER_BYTES)
                mine = secrets.token_bytes(NUMBER_BYTES)
                header = _HEADER.pack(number, self._rank, length, mine, is_encrypted())
                connection.sendall(header + sign(header, PLACE))
                _expect(connection, header, WANTED)
                _send_file(connection, file, header)
                _expect(connection, header, KEPT)
        except OSError as error:
            log.warning("snapshot has no second copy on another node: %s", error)

    def distrust(self, ranks: Collection[int]) -> None:
        """Until the next rendezvous, keep nothing of these ranks: it may be on its way already."""
        self._distrusted = frozenset(ranks)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self._unproven.add(connection)
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with suppress(OSError, BadState), connection:
            connection.settimeout(TIMEOUT_S)
            try:
                header = _read_header(connection)
            finally:
                self._unproven.remove(connection)
            _, rank, length, _, encrypted = _HEADER.unpack(header)
            if encrypted != is_encrypted():
                log.warning(
                    "the copy of rank %d is refused: does its node use another --encrypt-state?",
                    rank,
                )
                return
            connection.sendall(sign(header, WANTED))
            draft = self._folder / f"draft-{rank}-{threading.get_ident()}"
            try:
                _write_file(connection, draft, length, header)
                info = snapshot_file.inspect(draft)
                if info is not None and rank not in self._distrusted:
                    draft.rename(snapshots.next_file(self._folder, rank, info))
                connection.sendall(sign(header, KEPT))
            finally:
                draft.unlink(missing_ok=True)


def _read_header(connection: socket.socket) -> bytes:
    """Raises BadState unless its sender knows the job's key, now and not in a recording."""
    number = secrets.token_bytes(NUMBER_BYTES)
    connection.sendall(number)
    header = _read_exactly(connection, _HEADER.size)
    proof = _read_exactly(connection, DIGEST)
    if header[:NUMBER_BYTES] != number or not secrets.compare_digest(proof, sign(header, PLACE)):
        raise BadState("a copy was offered without the job's key")
    return header


def _expect(connection: socket.socket, header: bytes, what: str) -> None:
    if not secrets.compare_digest(_read_exactly(connection, DIGEST), sign(header, what)):
        raise OSError("the receiver does not know the job's key")


def _send_file(connection: socket.socket, file: BinaryIO, header: bytes) -> None:
    if not is_encrypted():
        connection.sendfile(file)
        return
    encrypter = Encrypter(_key(header), connection.sendall)
    while chunk := file.read(CHUNK):
        encrypter.send(memoryview(chunk))
    encrypter.flush()


def _write_file(connection: socket.socket, draft: Path, length: int, header: bytes) -> None:
    def receive(target: memoryview) -> None:
        while target.nbytes:
            got = connection.recv_into(target)
            if not got:
                raise OSError("the sender has closed the connection")
            target = target[got:]

    fill = Decrypter(_key(header), receive).receive if is_encrypted() else receive
    space = memoryview(bytearray(CHUNK))
    with draft.open("wb") as file:
        for left in range(length, 0, -CHUNK):
            chunk = space[: min(left, CHUNK)]
            fill(chunk)
            file.write(chunk)


def _key(header: bytes) -> bytes:
    """Of one copy on its way: the header has random numbers of both ends."""
    return key_for(f"{PLACE} {header.hex()}")


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise OSError("the sender has closed the connection")
        data += part
    return data
