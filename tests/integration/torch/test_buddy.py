"""Copies of snapshots on their way to another node: what a stranger on the network can do to them.

Any process that reaches torch's store knows the addresses, and can put its own in their place.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from taskd.runtime.clock import monotonic
from taskd.runtime.limits.waiting_connections import MOST_WAITING
from taskd.torch.copies import buddy, snapshot_file
from taskd.torch.copies.buddy import Buddy
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state.sealed import DIGEST

LIMIT = timedelta(seconds=30)
BODY = b"the weights of the model" * 1000


@pytest.fixture
def meeting() -> Rendezvous:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    found = Rendezvous(f"127.0.0.1:{store.port}", "1/", LIMIT)
    found.keep = store  # type: ignore[attr-defined]
    return found


class Pair:
    """Rank 0 on node 0, which sends, and rank 1 on node 1, which keeps."""

    def __init__(self, folder: Path, meeting: Rendezvous) -> None:
        self.kept, self.meeting = folder / "node1", meeting
        self.kept.mkdir()
        self.file = folder / "snapshot-0.0"
        self.write(step=5)
        self.sender = Buddy(folder, 0, 0)
        Buddy(self.kept, 1, 1).announce(meeting)
        _, host, port = meeting.store.get("buddy/1").decode().split()
        self.address = host, int(port)

    def write(self, step: int) -> None:
        head = snapshot_file._HEAD.pack(snapshot_file.MAGIC, step, len(BODY), 1, b"shard")
        self.file.write_bytes(head.ljust(snapshot_file.HEAD, b"\0") + BODY)

    def send(self, to: tuple[str, int] | None = None) -> None:
        host, port = to or self.address
        self.meeting.store.set("buddy/1", f"1 {host} {port}")
        assert self.sender.choose(self.meeting, [0, 1])
        self.sender.send(self.file)

    def steps(self) -> set[int]:
        found = map(snapshot_file.inspect, self.kept.glob("snapshot-*"))
        return {one.step for one in found if one is not None}


@pytest.fixture
def pair(tmp_path: Path, meeting: Rendezvous) -> Pair:
    return Pair(tmp_path, meeting)


@pytest.fixture(autouse=True)
def in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy, "is_encrypted", lambda: False)


class Stranger:
    """Its address is in the store; it passes everything on and records it, or answers itself."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._server:
            connection = self._server.accept()[0]
        with connection:
            self._answer(connection)

    def join(self) -> None:
        self._thread.join(30)


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def test_copy_arrives(pair: Pair) -> None:
    pair.send()
    assert pair.steps() == {5}
    (kept,) = pair.kept.glob("snapshot-*")
    assert kept.read_bytes() == pair.file.read_bytes()


def test_stranger_whose_address_is_in_the_store_gets_no_copy(pair: Pair) -> None:
    got: list[bytes] = []

    def pretend(connection: socket.socket) -> None:
        connection.sendall(bytes(16) + bytes(16))  # a number, and a guess for the proof
        got.append(read_all(connection))

    stranger = Stranger(pretend)
    pair.send(stranger.address)
    stranger.join()
    assert len(got[0]) > 0
    assert b"weights" not in got[0]


def test_recorded_copy_cannot_be_sent_again(pair: Pair) -> None:
    """An attacker who has listened offers an older copy, in the place of the newest."""
    sent = bytearray()

    def pass_on(near: socket.socket) -> None:
        with socket.create_connection(pair.address, 30) as far:

            def up() -> None:
                while data := near.recv(1 << 16):
                    sent.extend(data)
                    far.sendall(data)

            thread = threading.Thread(target=up)
            thread.start()
            while data := far.recv(1 << 16):
                near.sendall(data)
            thread.join(30)

    stranger = Stranger(pass_on)
    pair.send(stranger.address)
    stranger.join()
    assert pair.steps() == {5}
    for step in (6, 7):
        pair.write(step)
        pair.send()
    assert pair.steps() == {6, 7}
    with socket.create_connection(pair.address, 30) as replay:
        assert len(replay.recv(16)) == 16
        replay.sendall(sent[: buddy._HEADER.size + DIGEST])
        assert read_all(replay) == b""
    assert pair.steps() == {6, 7}


def test_silent_strangers_neither_keep_a_copy_away_nor_take_all_threads(pair: Pair) -> None:
    before = threading.active_count()
    with ExitStack() as strangers:
        for _ in range(3 * MOST_WAITING):
            strangers.enter_context(socket.create_connection(pair.address, 30))
        pair.send()
        assert pair.steps() == {5}
        deadline = monotonic() + 30
        while (now := threading.active_count() - before) > MOST_WAITING + 1:
            assert monotonic() < deadline, f"{now} threads"
