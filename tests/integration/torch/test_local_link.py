"""State between two processes of one machine, over a Unix socket: what others can do to it.

Any process can read and write torch's store. Another user cannot enter the folder of the node; the
tests, which run as root, put its socket there nevertheless.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from taskd.errors import PeerUnreachable
from taskd.runtime.clock import monotonic
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import local_link, state_link
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import Receive, Send, StateRequest

LIMIT = timedelta(seconds=30)
STATE = b"%024d" % 7 + b"the weights of the model" * 1000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

LISTENER = """
import os, signal, socket, sys
path, user, stops = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stops"
server = socket.socket(socket.AF_UNIX)
server.bind(path)
if user:
    os.setuid(user)
server.listen()
print("ready", flush=True)
if stops:
    os.kill(os.getpid(), signal.SIGSTOP)
sys.stdin.read()
"""
RELAY = """
import socket, sys, threading
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
near, far = server.accept()[0], socket.socket(socket.AF_UNIX)
far.connect(sys.argv[2])
def copy(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)
threading.Thread(target=copy, args=(near, far), daemon=True).start()
copy(far, near)
"""
CONNECT = """
import sys
from pathlib import Path
from taskd.torch.state import local_link
connection = local_link.connect(Path(sys.argv[1]), b"secret", 30)
print("connected" if connection else "not local")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the node, in shared memory."""
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(state_link, "local_folder", lambda: folder)
    return folder


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def meet(store: TCPStore, limit: timedelta = LIMIT) -> Rendezvous:
    return Rendezvous(f"127.0.0.1:{store.port}", "1/", limit)


def send_state(request: StateRequest, send: Send) -> None:
    """Says first whether it came over a local connection."""
    send(memoryview(STATE))
    send(memoryview(b"L" if request.is_local else b"T"))


def got_locally(rendezvous: Rendezvous, sources: tuple[int, ...] = (0,)) -> bool:
    """Fetch the state from the first of them, and tell how it came."""
    got = bytearray(len(STATE) + 1)

    def read(receive: Receive) -> None:
        receive(memoryview(got))

    with state_link.local_connections(rendezvous, sources) as local:
        state_link.fetch(rendezvous, sources[0], StateRequest("a"), read, local.get(sources[0]))
    assert got[:-1] == STATE
    assert got[-1:] == (b"L" if local else b"T")
    return bool(local)


@contextmanager
def serving(store: TCPStore, rank: int = 0, write: state_link.Write = send_state) -> Iterator[None]:
    """A sender in this process. What it raises is raised here."""
    rendezvous = meet(store)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(state_link.serve, rendezvous, rank, [1], write)
        try:
            store.wait([f"1//state/{rank}"])
            yield
        except BaseException:
            rendezvous.abort()
            raise
        served.result()


def only_socket(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@contextmanager
def process(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, once it is ready."""
    started = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_state_comes_over_the_socket(
    store: TCPStore, folder: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(state_link, "is_encrypted", lambda: encrypted)
    with serving(store):
        assert only_socket(folder).is_socket()
        assert got_locally(meet(store))
    assert not list(folder.iterdir()), "the socket was left"


@needs_root
def test_socket_of_another_user_is_not_used(store: TCPStore, folder: Path) -> None:
    with serving(store):
        path = only_socket(folder)
        path.unlink()
        with process(LISTENER, path, 1234, "runs"):
            path.chmod(0o777)
            assert not got_locally(meet(store))


@needs_root
def test_connection_of_another_user_is_closed_at_once(store: TCPStore, folder: Path) -> None:
    caller = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setuid(1234)
stranger = socket.socket(socket.AF_UNIX)
stranger.settimeout(20)
stranger.connect(sys.argv[2])
print(stranger.recv(1))
"""
    with serving(store):
        folder.chmod(0o711)
        path = only_socket(folder)
        path.chmod(0o777)
        asked = subprocess.run(
            [sys.executable, "-c", caller, folder, path.name], capture_output=True, text=True
        )
        assert asked.stdout == "b''\n", asked.stderr
        folder.chmod(0o700)
        assert got_locally(meet(store))


def test_relay_of_the_same_user_is_refused(store: TCPStore, folder: Path) -> None:
    """Each end knows from the kernel which process it talks to."""
    got: list[bool] = []
    with pytest.raises(PeerUnreachable), serving(store), relayed(folder):
        got.append(got_locally(meet(store)))
    assert not got


@contextmanager
def relayed(folder: Path) -> Iterator[None]:
    path = only_socket(folder)
    moved = path.rename(folder / "moved")
    with process(RELAY, path, moved):
        yield


class Recorder:
    """Between both ends, in the process of both: the kernel cannot tell it from them."""

    def __init__(self, path: Path) -> None:
        self.answer = b""
        self._far = path.rename(path.with_name("moved"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._server, socket.socket(socket.AF_UNIX) as far:
            near = self._server.accept()[0]
            far.connect(str(self._far))
            threading.Thread(target=self._copy_up, args=(near, far), daemon=True).start()
            with near:
                while data := far.recv(1 << 16):
                    self.answer += data
                    near.sendall(data)

    def _copy_up(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)


def test_earlier_answer_is_refused(store: TCPStore, folder: Path) -> None:
    with serving(store):
        path = only_socket(folder)
        recorder = Recorder(path)
        assert got_locally(meet(store))

    def replay(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(recorder.answer)
            connection.recv(1 << 16)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        threading.Thread(target=replay, args=(server,), daemon=True).start()
        with pytest.raises(BadState, match="older, or forged"):
            got_locally(meet(store))


def test_peer_that_closes_in_the_middle_is_lost(store: TCPStore, folder: Path) -> None:
    def send_half(request: StateRequest, send: Send) -> None:
        send(memoryview(STATE[: len(STATE) // 2]))
        raise PeerUnreachable("the disk is gone")

    with (
        pytest.raises(PeerUnreachable, match="closed the connection"),
        serving(store, 0, send_half),
    ):
        got_locally(meet(store))


def test_peer_that_is_stopped_is_lost_at_the_deadline(store: TCPStore, folder: Path) -> None:
    with serving(store):
        path = only_socket(folder)
        moved = path.rename(folder / "moved")
        with process(LISTENER, path, 0, "stops"), pytest.raises(PeerUnreachable, match="timed out"):
            got_locally(meet(store, timedelta(seconds=2)))
        path.unlink()
        moved.rename(path)
        assert got_locally(meet(store)), "the sender has lost its place"


def test_peer_that_was_killed_is_not_waited_for(store: TCPStore, folder: Path) -> None:
    """Its socket is left in the folder."""
    with serving(store):
        path = only_socket(folder)
        path.unlink()
        with process(LISTENER, path, 0, "runs"):
            pass
        assert not got_locally(meet(store))
        path.unlink()


@pytest.mark.parametrize("what", ["open", "of another user", "a link", "missing"])
def test_folder_that_others_can_enter_is_not_used(
    store: TCPStore, folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    bad = folder.parent / "bad"
    match what:
        case "open":
            bad.mkdir()
            bad.chmod(0o750)
        case "of another user" if os.geteuid() == 0:
            bad.mkdir(mode=0o700)
            os.chown(bad, 1234, 1234)
        case "a link":
            bad.symlink_to(folder)
    monkeypatch.setattr(state_link, "local_folder", lambda: bad)
    with serving(store):
        assert not folder.exists() or not list(folder.iterdir())
        assert not got_locally(meet(store))


def test_receiver_with_another_folder_uses_tcp_at_once(
    store: TCPStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another container."""
    with serving(store):
        (tmp_path / "other").mkdir(mode=0o700)
        monkeypatch.setattr(state_link, "local_folder", lambda: tmp_path / "other")
        began = monotonic()
        assert not got_locally(meet(store))
        assert monotonic() - began < LIMIT.total_seconds() / 2


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
@pytest.mark.parametrize("flags", ["", "--pid --fork --mount-proc", "--user --map-root-user"])
def test_process_in_another_namespace_is_not_local(folder: Path, flags: str) -> None:
    """Also if it sees the same folder."""
    command = ["unshare", *flags.split()] if flags else []
    with local_link.listening(folder, b"secret") as server:
        assert server is not None
        asked = subprocess.run(
            [*command, sys.executable, "-c", CONNECT, str(folder)], capture_output=True, text=True
        )
    if flags and not asked.stdout and "unshare failed" in asked.stderr:
        pytest.skip(asked.stderr)
    assert asked.stdout == ("not local\n" if flags else "connected\n"), asked.stderr


def test_one_sender_elsewhere_makes_all_of_them_use_tcp(
    store: TCPStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the state would come without digests over TCP."""
    (tmp_path / "other").mkdir(mode=0o700)
    folders = {"1": tmp_path / "other"}
    monkeypatch.setattr(
        state_link, "local_folder", lambda: folders.get(threading.current_thread().name, folder)
    )
    threads = [
        threading.Thread(target=state_link.serve, args=(meet(store), 0, [2], send_state), name="0"),
        threading.Thread(target=state_link.serve, args=(meet(store), 1, [2], send_state), name="1"),
    ]
    for thread in threads:
        thread.start()
    assert not got_locally(meet(store), (0, 1))
    assert not got_locally(meet(store), (1,))
    for thread in threads:
        thread.join()


def test_store_has_no_say(store: TCPStore, folder: Path) -> None:
    """It names a socket elsewhere, or a number that leads out of the folder."""
    with serving(store):
        host, port, number = store.get("1//state/0").decode().split()
        for forged in ("../../tmp/socket", "zz"):
            store.set("1//state/0", f"{host} {port} {forged}")
            with pytest.raises(BadState, match="invalid address"):
                got_locally(meet(store))
        store.set("1//state/0", f"{host} {port} {number}")
        assert got_locally(meet(store))
