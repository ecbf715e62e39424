"""Connections that send much before a call of theirs was admitted are closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from taskd.runtime.limits.connection_limit import Connection
from taskd.runtime.limits.unproven_connections import (
    MOST_AFTER_FLOOD,
    MOST_TOGETHER,
    MOST_UNPROVEN_BYTES,
    UnprovenConnections,
    received,
    to_close,
)

TOO_MUCH = MOST_UNPROVEN_BYTES + 1
Pair = tuple[socket.socket, socket.socket]


def unproven(address: str, *received: int) -> list[tuple[Connection, float]]:
    return [(Connection(fd, address, fd), count) for fd, count in enumerate(received)]


def test_those_who_send_little_stay() -> None:
    assert to_close(unproven("a", *[2000] * 50)) == []


def test_those_who_have_sent_the_most_are_closed() -> None:
    some = unproven("a", 10, TOO_MUCH, 500, TOO_MUCH)
    assert [one.fd for one in to_close([*some, *unproven("b", 100)])] == [1, 3]


def test_many_small_ones_of_one_address_count_together() -> None:
    assert len(to_close(unproven("a", *[2000] * 200))) == 200 - MOST_UNPROVEN_BYTES // 2000


def test_an_address_that_has_flooded_may_send_less() -> None:
    some = unproven("a", 2000, MOST_AFTER_FLOOD)
    assert [one.fd for one in to_close(some, {"a"})] == [1]
    assert to_close(some, {"b"}) == []


def test_many_addresses_that_send_much_count_together() -> None:
    much = MOST_UNPROVEN_BYTES // 2
    loud = [(Connection(fd, f"loud {fd}", fd), float(much)) for fd in range(50)]
    quiet = [(Connection(fd, f"quiet {fd}", fd), 2000.0) for fd in range(100, 1100)]
    closed = {one.fd for one in to_close([*loud, *quiet])}
    assert closed == set(range(50)), "1,000 nodes that join at once, and 50 that send much"
    assert to_close(quiet) == []
    assert len(to_close(loud)) == 50 - MOST_TOGETHER // much


class Server:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listening.getsockname()[1]

    def connect(self, source: str = "127.0.0.1", port: int = 0) -> Pair:
        near = self._stack.enter_context(
            closing(socket.create_connection(("127.0.0.1", self.port), 30, (source, port)))
        )
        return near, self._stack.enter_context(closing(self._listening.accept()[0]))


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


def name(near: socket.socket) -> str:
    host, port = near.getsockname()
    return f"ipv4:{host}:{port}"


def send_much(pair: Pair) -> None:
    near, far = pair
    left = TOO_MUCH
    while left:
        near.sendall(bytes(min(left, 16_384)))
        left -= len(far.recv(min(left, 16_384), socket.MSG_WAITALL))


def is_open(pair: Pair) -> bool:
    near, far = pair
    try:
        near.sendall(b"x")
        return far.recv(1) == b"x"
    except OSError:
        return False


def test_only_what_has_not_proved_anything_is_closed(server: Server) -> None:
    admitted, quiet, loud = (server.connect() for _ in range(3))
    watch = UnprovenConnections()
    watch.proved(name(admitted[0]))
    send_much(admitted)
    assert watch.enforce(server.port, 0.0) == []
    send_much(loud)
    assert [one.port for one in watch.enforce(server.port, 0.0)] == [loud[0].getsockname()[1]]
    assert [is_open(one) for one in (admitted, quiet, loud)] == [True, True, False]


def test_what_has_arrived_and_was_not_read_is_lost(server: Server) -> None:
    """Otherwise gRPC would still read up to megabytes of it."""
    loud, (near, far) = server.connect(), server.connect()
    watch = UnprovenConnections()
    send_much(loud)
    assert len(watch.enforce(server.port, 0.0)) == 1
    near.sendall(bytes(2 * MOST_AFTER_FLOOD))
    far.settimeout(30)
    far.recv(2 * MOST_AFTER_FLOOD, socket.MSG_PEEK | socket.MSG_WAITALL)
    assert len(watch.enforce(server.port, 1.0)) == 1
    with pytest.raises(ConnectionError):
        far.recv(1)


def test_another_port_is_not_looked_at(server: Server) -> None:
    loud = server.connect()
    send_much(loud)
    assert UnprovenConnections().enforce(server.port + 1, 0.0) == []
    assert is_open(loud)


def test_next_connection_from_the_same_port_has_proved_nothing(server: Server) -> None:
    first = server.connect()
    port = first[0].getsockname()[1]
    watch = UnprovenConnections()
    watch.proved(name(first[0]))
    assert watch.enforce(server.port, 0.0) == []
    first[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    first[0].close()
    first[1].close()
    second = server.connect(port=port)
    send_much(second)
    assert len(watch.enforce(server.port, 0.0)) == 1


def test_what_was_sent_long_ago_is_forgotten(
    server: Server,
) -> None:
    """Who asks for the health of a server proves nothing, and may do so for days."""
    near, far = server.connect()
    watch = UnprovenConnections()
    for turn in range(20):
        near.sendall(bytes(MOST_UNPROVEN_BYTES // 10))
        far.recv(MOST_UNPROVEN_BYTES // 10, socket.MSG_WAITALL)
        assert watch.enforce(server.port, 1000.0 * turn) == []
    assert is_open((near, far))


def test_closed_connection_has_received_nothing(server: Server) -> None:
    near, far = server.connect()
    near.sendall(bytes(7))
    far.recv(7, socket.MSG_WAITALL)
    found = Connection(far.fileno(), "127.0.0.1", 0)
    assert received(found) == 0
