"""One address must not take all descriptors of a server."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from taskd.runtime.limits.connection_limit import Connection, enforce, to_close


def connections(address: str, count: int, first: int = 0) -> list[Connection]:
    return [Connection(fd, address, fd) for fd in range(first, first + count)]


def test_nothing_is_closed_while_descriptors_are_left() -> None:
    assert to_close(connections("a", 500), used=600, limit=1000) == []


def test_newest_connections_of_the_greedy_address_are_closed() -> None:
    greedy, other = connections("a", 600), connections("b", 100, first=600)
    closed = to_close([*reversed(greedy), *other], used=710, limit=1000)
    assert sorted(closed, key=lambda one: one.age) == greedy[333:]


def test_real_connections_are_closed_and_others_stay() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]

        def connect(source: str) -> tuple[socket.socket, socket.socket]:
            near = socket.create_connection(("127.0.0.1", port), 30, (source, 0))
            return stack.enter_context(near), stack.enter_context(server.accept()[0])

        good = connect("127.0.0.2")
        many = [connect("127.0.0.1") for _ in range(30)]
        assert enforce(limit=100_000) == 0
        assert enforce(limit=30) == 20
        states = [near.send(b"x") and far.recv(1) for near, far in many[:10]]
        assert states == [b"x"] * 10
        assert all(near.recv(1) == b"" for near, _ in many[10:])
        good[0].send(b"y")
        assert good[1].recv(1) == b"y"
