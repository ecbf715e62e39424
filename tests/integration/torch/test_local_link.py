"""State between two processes of one machine, over a Unix socket: what others can do to it.

Any process can read and write torch's store. Another user cannot enter the folder of the node; the
tests, which run as root, put its socket there nevertheless.
"""

from __future__ import annotations

import logging
import os
import secrets
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
from tempfile import TemporaryDirectory

import pytest
from torch.distributed import TCPStore

from taskd.errors import PeerUnreachable
from taskd.runtime.clock import monotonic
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import local_link, state_link
from taskd.torch.state.sealed import DIGEST, BadState
from taskd.torch.state.state_link import (
    NUMBER_BYTES,
    REQUEST_BYTES,
    Conversation,
    Receive,
    Send,
    StateRequest,
)

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
LISTEN = """
import logging, sys
from pathlib import Path
from taskd.torch.state import local_link
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
with local_link.listening(Path(sys.argv[1]), b"secret") as server:
    print("listens" if server else "over TCP")
"""
CONNECT = """
import sys
from pathlib import Path
from taskd.torch.state import local_link
connection = local_link.connect(Path(sys.argv[1]), b"secret", 30)
print("connected" if connection else "not local")
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the node, in shared memory. Its path is short enough for the address of a socket."""
    with TemporaryDirectory() as short:
        folder = Path(short) / "node"
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(state_link, "local_folder", lambda: folder)
        yield folder


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
    assert bytes(got[:-1]) == STATE
    assert bytes(got[-1:]) == (b"L" if local else b"T")
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


def number_of(store: TCPStore) -> bytes:
    """Of sender 0."""
    return bytes.fromhex(store.get("1//state/0").decode().split()[2])


def hello(
    path: Path, number: bytes, place: str, *, ends: bytes | None = None
) -> tuple[bytes, bytes]:
    """Ask there for state, with the key of the job. Returns what was sent and what was answered."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect(str(path))
        known = local_link.both_ends(caller, listens=False) if ends is None else ends
        talk = Conversation(
            place,
            number,
            secrets.token_bytes(NUMBER_BYTES),
            str(StateRequest("a")).encode().ljust(REQUEST_BYTES, b"\0"),
            False,
            known,
        )
        sent = talk.asked + talk.request + talk.receiver_proof()
        return sent, exchanged(caller, sent)


def exchanged(caller: socket.socket, sent: bytes) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        caller.sendall(sent)
        while data := caller.recv(1 << 16):
            answer += data
            if len(answer) == DIGEST + len(STATE) + 1:
                caller.sendall(b"!")
    return answer


@pytest.mark.parametrize(
    ("place", "ends"),
    [
        ("rank 0 at 2/", None),
        ("rank 1 at 1/", None),
        ("rank 0 at 1/", b""),
        ("rank 0 at 1/", b"1 2 elsewhere"),
    ],
    ids=["another incident", "another rank", "as over TCP", "of other processes"],
)
def test_hello_for_something_else_is_refused(
    store: TCPStore, folder: Path, place: str, ends: bytes | None
) -> None:
    with serving(store):
        assert hello(only_socket(folder), number_of(store), place, ends=ends)[1] == b""
        assert got_locally(meet(store)), "a stranger has taken the place of the receiver"


def test_hello_without_the_key_or_sent_twice_is_refused(store: TCPStore, folder: Path) -> None:
    """As from another job of the same user, which may enter the folder."""
    rendezvous = meet(store)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(state_link.serve, rendezvous, 0, [1, 2], send_state)
        store.wait(["1//state/0"])
        path = only_socket(folder)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            request = str(StateRequest("a")).encode().ljust(REQUEST_BYTES, b"\0")
            assert exchanged(stranger, bytes(NUMBER_BYTES) + request + bytes(DIGEST)) == b""
        sent, answer = hello(path, number_of(store), "rank 0 at 1/")
        assert answer[DIGEST:] == STATE + b"L"
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            assert exchanged(stranger, sent) == b""
        assert got_locally(meet(store)), "a stranger has taken the place of the receiver"
        served.result()


def test_planted_name_makes_the_sender_use_tcp(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its number would have to be known before it is chosen."""
    caplog.set_level(logging.DEBUG)
    planted = folder / local_link._name(b"secret")
    for what in ("a file", "a link", "a socket"):
        match what:
            case "a file":
                planted.touch()
            case "a link":
                planted.symlink_to(folder / "elsewhere")
            case _:
                with socket.socket(socket.AF_UNIX) as other:
                    other.bind(str(planted))
        with local_link.listening(folder, b"secret") as server:
            assert server is None
        assert "state is sent over TCP only" in caplog.text
        assert "in use" in caplog.text
        assert os.path.lexists(planted), "what belongs to others was removed"
        planted.unlink()
        caplog.clear()


@needs_root
def test_link_to_a_socket_of_another_user_is_not_used(store: TCPStore, folder: Path) -> None:
    with serving(store):
        path = only_socket(folder)
        path.unlink()
        elsewhere = folder.parent / "socket"
        with process(LISTENER, elsewhere, 1234, "runs"):
            elsewhere.chmod(0o777)
            path.symlink_to(elsewhere)
            assert not got_locally(meet(store))
            path.unlink()


def test_peer_that_closes_in_the_middle_is_lost(store: TCPStore, folder: Path) -> None:
    def send_half(request: StateRequest, send: Send) -> None:
        send(memoryview(STATE[: len(STATE) // 2]))
        raise PeerUnreachable("the disk is gone")

    with (
        pytest.raises(PeerUnreachable, match="closed the connection"),
        serving(store, 0, send_half),
    ):
        got_locally(meet(store))


def test_receiver_that_is_lost_in_the_middle_is_reported(store: TCPStore, folder: Path) -> None:
    def send_endlessly(request: StateRequest, send: Send) -> None:
        while True:
            send(memoryview(STATE))

    def die(receive: Receive) -> None:
        receive(memoryview(bytearray(len(STATE))))
        raise PeerUnreachable("killed")

    rendezvous = meet(store)
    with (
        pytest.raises(PeerUnreachable, match="a receiver did not get the state"),
        serving(store, 0, send_endlessly),
        state_link.local_connections(rendezvous, [0]) as local,
        pytest.raises(PeerUnreachable, match="killed"),
    ):
        state_link.fetch(rendezvous, 0, StateRequest("a"), die, local[0])


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
        path.unlink(missing_ok=True)  # the sender, which has ended, removes it as well


@pytest.mark.parametrize("what", ["open", "of another user", "a link", "missing"])
def test_folder_that_others_can_enter_is_not_used(
    store: TCPStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    caplog.set_level(logging.DEBUG)
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
        case _:
            assert not bad.exists()
    monkeypatch.setattr(state_link, "local_folder", lambda: bad)
    with serving(store):
        assert not folder.exists() or not list(folder.iterdir())
        assert not got_locally(meet(store))
    assert "state is sent over TCP only" in caplog.text
    assert "state is received over TCP" in caplog.text


def test_folder_may_be_deleted_at_any_time(store: TCPStore, folder: Path) -> None:
    with serving(store):
        shutil.rmtree(folder)
        assert not got_locally(meet(store)), "a receiver that comes later"
    with serving(store, 1):
        assert not got_locally(meet(store), (1,)), "a sender that comes later"


def test_folder_with_a_long_path(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a Unix socket has at most 108 bytes."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(state_link, "local_folder", lambda: folder)
    with serving(store):
        assert got_locally(meet(store))
    assert not list(folder.iterdir()), "the socket was left"


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


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        (CONNECT, "mode=700", "not local"),
        (LISTEN, "mode=700", "listens"),
        (LISTEN, "mode=700,nr_inodes=1", "No space left on device"),
        (LISTEN, "mode=700,ro", "Read-only file system"),
    ],
    ids=["folder of another container", "own folder", "full", "not writable"],
)
def test_another_file_system_in_the_place_of_the_folder(
    folder: Path, script: str, options: str, said: str
) -> None:
    """As in a container with the same namespaces of processes and users."""
    mounted = 'mount -t tmpfs -o "$1" none "$2" && exec "$3" -c "$4" "$2"'
    words = ["sh", "-c", mounted, "sh", options, str(folder), sys.executable, script]
    with local_link.listening(folder, b"secret") as server:
        assert server is not None
        asked = subprocess.run(["unshare", "--mount", *words], capture_output=True, text=True)
    if not asked.stdout and "unshare failed" in asked.stderr:
        pytest.skip(asked.stderr)
    assert said in asked.stdout, asked.stderr
    if said not in ("listens", "not local"):
        assert "over TCP" in asked.stdout.splitlines()[-1]


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
