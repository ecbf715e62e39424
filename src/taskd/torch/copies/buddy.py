"""A second copy of each snapshot on another node: a lost node takes its shared memory along.

Each rank keeps copies for others and sends its own to a rank on another node
(`core/manager/copy_placement.py` says whom to ask first). The keepers' addresses are in the store
of the current meeting. Sending follows the local copy in the same thread, so it costs the
training nothing but the link.
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
from taskd.torch.copies import snapshot_file as page
from taskd.torch.copies import snapshots
from taskd.torch.groups.store import Meeting

log = logging.getLogger(__name__)

SECRET_BYTES = 16
_WHO = struct.Struct("<16sQQ")
"""Secret, rank, length of the file that follows."""
TIMEOUT_S = 30.0
CHUNK = 1 << 20


class Keeper:
    """Takes the copies of others into this node's memory, for the life of the process."""

    def __init__(self, folder: Path, rank: int, node: int) -> None:
        self._folder, self._rank, self._node = folder, rank, node
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._door: socket.socket | None = None
        self._buddy: tuple[str, int, bytes] | None = None
        self._distrusted: frozenset[int] = frozenset()

    def announce(self, meeting: Meeting) -> None:
        """Say where we are, at each meeting anew: others may have come since."""
        self._distrusted = frozenset()
        if self._door is None:
            self._door = socket.create_server((meeting.my_host(), 0))
            threading.Thread(target=self._open, name="taskd-keeper", daemon=True).start()
        host, port = self._door.getsockname()[:2]
        told = f"{self._node} {host} {port} {self._secret.hex()}"
        meeting.store.set(f"keeper/{self._rank}", told)

    def choose(self, meeting: Meeting, ranks: list[int]) -> bool:
        """Find the buddy among all who have announced themselves. False: there is no other node."""
        per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._buddy = None
        for rank in placement.buddy_candidates(self._rank, ranks, per_node):
            node, host, port, secret = meeting.store.get(f"keeper/{rank}").decode().split()
            if int(node) != self._node:
                self._buddy = host, int(port), bytes.fromhex(secret)
                return True
        return False

    def send(self, path: Path) -> None:
        """Give the buddy a copy of this file. A copy that fails is made again with the next."""
        if self._buddy is None:
            return
        host, port, secret = self._buddy
        try:
            with (
                path.open("rb") as file,
                socket.create_connection((host, port), TIMEOUT_S) as link,
            ):
                length = path.stat().st_size
                link.sendall(_WHO.pack(secret, self._rank, length))
                link.sendfile(file)
        except OSError as error:
            log.warning("no copy of the snapshot on another node: %s", error)

    def distrust(self, ranks: Collection[int]) -> None:
        """Until the next meeting, keep nothing of these ranks: it may have been sent before."""
        self._distrusted = frozenset(ranks)

    def _open(self) -> None:
        assert self._door is not None
        while True:
            try:
                guest, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._keep, args=(guest,), daemon=True).start()

    def _keep(self, guest: socket.socket) -> None:
        with suppress(OSError), guest:
            guest.settimeout(TIMEOUT_S)
            secret, rank, length = _WHO.unpack(_exactly(guest, _WHO.size))
            if not secrets.compare_digest(secret, self._secret):
                return
            draft = self._folder / f"draft-{rank}-{threading.get_ident()}"
            try:
                _store(guest, draft, length)
                found = page.look(draft)
                if found is not None and rank not in self._distrusted:
                    draft.rename(snapshots.place_of(self._folder, f"{rank}.kept"))
            finally:
                draft.unlink(missing_ok=True)


def _store(guest: socket.socket, draft: Path, length: int) -> None:
    with draft.open("wb") as file:
        left = length
        while left:
            chunk = guest.recv(min(CHUNK, left))
            if not chunk:
                raise OSError("the sender is gone")
            file.write(chunk)
            left -= len(chunk)


def _exactly(guest: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        part = guest.recv(length - len(got))
        if not part:
            raise OSError("the sender is gone")
        got += part
    return got
