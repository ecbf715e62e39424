"""The connection that carries state, in one process: what a stranger on the network can do to it.

Any process that reaches torch's store knows the address and the random number of a sender, and can
put its own address in their place.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from taskd.errors import PeerUnreachable
from taskd.runtime.limits.waiting_connections import MOST_WAITING
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import state_link
from taskd.torch.state.link_encryption import RECORD, SMALL
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import FIRST_BYTES, Receive, Send, StateRequest

LIMIT = timedelta(seconds=30)
STATE = b"%024d" % 7 + b"the weights of the model" * 1000


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_encrypted = bool(request.param)
    monkeypatch.setattr(state_link, "is_encrypted", lambda: is_encrypted)
    return is_encrypted


def meet(store: TCPStore, prefix: str = "1/") -> Rendezvous:
    return Rendezvous(f"127.0.0.1:{store.port}", prefix, LIMIT)


def write_state(request: StateRequest, send: Send) -> None:
    send(memoryview(STATE[:FIRST_BYTES]))
    for at in range(FIRST_BYTES, len(STATE), 7000):
        send(memoryview(STATE[at : at + 7000]))


def reader(into: bytearray) -> Callable[[Receive], None]:
    return lambda receive: receive(memoryview(into))


class Wire:
    """Between receiver and sender, as an attacker who has replaced the address in the store."""

    def __init__(self, store: TCPStore, prefix: str, flipped: int | None) -> None:
        """`flipped` is the number of a byte of the answer in which one bit is changed."""
        self.down, self.up = b"", b""
        self._flipped = flipped
        key = f"{prefix}/state/0"
        store.wait([key])
        host, port, number = store.get(key).decode().split()
        self.number = number
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        store.set(key, f"127.0.0.1 {self._server.getsockname()[1]} {number}")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._server:
            near = self._server.accept()[0]
        with near, socket.create_connection(self._target) as far:
            threading.Thread(target=self._copy_up, args=(near, far), daemon=True).start()
            with suppress(OSError):
                while data := bytearray(far.recv(1 << 16)):
                    at, self.down = len(self.down), self.down + data
                    if self._flipped is not None and at <= self._flipped < at + len(data):
                        data[self._flipped - at] ^= 1
                    near.sendall(data)

    def _copy_up(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                self.up += data
                far.sendall(data)
        with suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)


def transferred(store: TCPStore, flipped: int | None = None) -> tuple[bytes, bytes]:
    """What the receiver got, and what was on the wire."""
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(state_link.serve, meet(store), 0, [1], write_state)
        wire, got = Wire(store, "1/", flipped), bytearray(len(STATE))
        try:
            state_link.fetch(meet(store), 0, StateRequest("a"), reader(got))
        except BadState:
            with pytest.raises(PeerUnreachable):
                served.result()
            raise
        served.result()
        return bytes(got), wire.down


def test_state_arrives(store: TCPStore, encrypted: bool) -> None:
    got, wire = transferred(store)
    assert got == STATE
    assert (b"the weights of the model" in wire) is not encrypted


def test_change_of_the_first_bytes_is_refused(store: TCPStore, encrypted: bool) -> None:
    with pytest.raises(BadState):
        transferred(store, flipped=5)


@pytest.mark.parametrize("at", [4, 21, 4000, 20_000])
def test_every_change_of_encrypted_state_is_refused(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(state_link, "is_encrypted", lambda: True)
    with pytest.raises(BadState, match="changed on its way"):
        transferred(store, flipped=at)


def replayed(store: TCPStore, recorded: bytes, prefix: str) -> None:
    """Offer an earlier answer instead of the sender, to whatever is requested."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        store.set(f"{prefix}/state/0", f"127.0.0.1 {port} {'00' * 32}")

        def answer() -> None:
            connection = server.accept()[0]
            with connection:
                connection.sendall(recorded)
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        got = bytearray(len(STATE))
        state_link.fetch(meet(store, prefix), 0, StateRequest("a"), reader(got))


@pytest.mark.parametrize("prefix", ["1/", "2/"], ids=["same incident", "later incident"])
def test_earlier_answer_is_refused(store: TCPStore, encrypted: bool, prefix: str) -> None:
    _, recorded = transferred(store)
    with pytest.raises(BadState):
        replayed(store, recorded, prefix)


def test_answer_of_another_rank_is_refused(store: TCPStore, encrypted: bool) -> None:
    """Its address is put in the place of the requested one."""
    with ThreadPoolExecutor(1) as pool:
        at = meet(store)
        served = pool.submit(state_link.serve, at, 5, [1], write_state)
        store.wait(["1//state/5"])
        store.set("1//state/0", store.get("1//state/5").decode())
        with pytest.raises(PeerUnreachable):
            state_link.fetch(meet(store), 0, StateRequest("a"), reader(bytearray(len(STATE))))
        at.abort()
        with pytest.raises(PeerUnreachable, match="without the job's key"):
            served.result()


def test_stranger_who_reads_the_store_gets_no_state(store: TCPStore, encrypted: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(state_link.serve, meet(store), 0, [1], write_state)
        store.wait(["1//state/0"])
        host, port, number = store.get("1//state/0").decode().split()
        with socket.create_connection((host, int(port)), 30) as stranger:
            text = str(StateRequest("a")).encode().ljust(160, b"\0")
            stranger.sendall(bytes.fromhex(number) + text + bytes(16))
            assert stranger.recv(1) == b""
        got = bytearray(len(STATE))
        state_link.fetch(meet(store), 0, StateRequest("a"), reader(got))
        served.result()
        assert got == STATE, "the stranger has taken the place of the receiver"


def test_silent_and_replaying_strangers_take_no_place(store: TCPStore, encrypted: bool) -> None:
    """They connect first and say nothing, or repeat the request of a receiver."""
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        served = pool.submit(state_link.serve, meet(store), 0, [1, 2], write_state)
        store.wait(["1//state/0"])
        host, port, _ = store.get("1//state/0").decode().split()
        for _ in range(2 * MOST_WAITING):
            strangers.enter_context(socket.create_connection((host, int(port)), 30))
        wire, got = Wire(store, "1/", None), [bytearray(len(STATE)) for _ in range(2)]
        state_link.fetch(meet(store), 0, StateRequest("a"), reader(got[0]))
        with socket.create_connection((host, int(port)), 30) as stranger:
            stranger.sendall(wire.up[:208])
            assert stranger.recv(1) == b""
        store.set("1//state/0", f"{host} {port} {wire.number}")
        state_link.fetch(meet(store), 0, StateRequest("a"), reader(got[1]))
        served.result()
        assert got == [STATE, STATE]


def test_nodes_that_disagree_about_encryption_are_told(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = iter([True, False])
    monkeypatch.setattr(state_link, "is_encrypted", lambda: next(sides))
    with ThreadPoolExecutor(1) as pool:
        at = meet(store)
        served = pool.submit(state_link.serve, at, 0, [1], write_state)
        store.wait(["1//state/0"])
        with pytest.raises(PeerUnreachable):
            state_link.fetch(meet(store), 0, StateRequest("a"), reader(bytearray(len(STATE))))
        at.abort()
        with pytest.raises(PeerUnreachable, match="--encrypt-state"):
            served.result()


@pytest.mark.parametrize("sizes", [[1], [SMALL - 1, 2], [RECORD], [3 * RECORD + 5, 1, SMALL]])
def test_records_of_any_size(sizes: list[int]) -> None:
    from taskd.torch.state.link_encryption import Decrypter, Encrypter

    sent, key = bytearray(), bytes(32)
    encrypter = Encrypter(key, lambda data: sent.extend(data))
    parts = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    for part in parts:
        encrypter.send(memoryview(part))
    encrypter.flush()
    at = 0

    def receive(target: memoryview) -> None:
        nonlocal at
        target[:] = sent[at : at + target.nbytes]
        at += target.nbytes

    got = bytearray(sum(sizes))
    Decrypter(key, receive).receive(memoryview(got))
    assert got == b"".join(parts)
