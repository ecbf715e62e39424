"""A second copy of each snapshot on another node: a lost node takes its shared memory along.

Each rank keeps copies for others and sends its own to a rank on another node, its buddy
(`core/manager/copy_placement.py` says which ranks to try first). The addresses are in the store of
the current rendezvous. Sending follows the local copy in the same thread, so it costs training
nothing but bandwidth.
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

from taskd import config
from taskd.core.manager import copy_placement as placement
from taskd.torch.copies import snapshot_file, snapshots
from taskd.torch.groups.store import Rendezvous

log = logging.getLogger(__name__)

SECRET_BYTES = 16
_HEADER = struct.Struct("<16sQQ")
"""Secret, rank, length of the file that follows."""
TIMEOUT_S = 30.0
CHUNK = 1 << 20


class Buddy:
    """Keeps copies of other ranks in this node's memory, and sends ours to another node."""

    def __init__(self, folder: Path, rank: int, node: int) -> None:
        self._folder, self._rank, self._node = folder, rank, node
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server: socket.socket | None = None
        self._target: tuple[str, int, bytes] | None = None
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
        address = f"{self._node} {host} {port} {self._secret.hex()}"
        rendezvous.store.set(f"buddy/{self._rank}", address)

    def choose(self, rendezvous: Rendezvous, ranks: list[int]) -> bool:
        """Choose where our copies go, among all that have announced. False: no other node."""
        per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._target = None
        for rank in placement.buddy_candidates(self._rank, ranks, per_node):
            node, host, port, secret = rendezvous.store.get(f"buddy/{rank}").decode().split()
            if int(node) != self._node:
                self._target = host, int(port), bytes.fromhex(secret)
                return True
        return False

    def send(self, path: Path) -> None:
        """Send a copy of this file. If it fails, the next snapshot tries again."""
        if self._target is None:
            return
        host, port, secret = self._target
        try:
            with (
                path.open("rb") as file,
                socket.create_connection((host, port), TIMEOUT_S) as connection,
            ):
                length = path.stat().st_size
                connection.sendall(_HEADER.pack(secret, self._rank, length))
                connection.sendfile(file)
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
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(TIMEOUT_S)
            header = _read_exactly(connection, _HEADER.size)
            secret, rank, length = _HEADER.unpack(header)
            if not secrets.compare_digest(secret, self._secret):
                return
            draft = self._folder / f"draft-{rank}-{threading.get_ident()}"
            try:
                _write_file(connection, draft, length)
                info = snapshot_file.inspect(draft)
                if info is not None and rank not in self._distrusted:
                    draft.rename(snapshots.next_file(self._folder, f"{rank}.kept"))
            finally:
                draft.unlink(missing_ok=True)


def _write_file(connection: socket.socket, draft: Path, length: int) -> None:
    with draft.open("wb") as file:
        left = length
        while left:
            chunk = connection.recv(min(CHUNK, left))
            if not chunk:
                raise OSError("the sender has closed the connection")
            file.write(chunk)
            left -= len(chunk)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise OSError("the sender has closed the connection")
        data += part
    return data
