"""Which callers are held off, and that the kernel does it."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator

import pytest

from taskd.runtime.limits import connect_filter
from taskd.runtime.limits.refused_callers import (
    CALLS,
    FEWEST,
    HOLD_S,
    MOST,
    MOST_PER_S,
    WINDOW_S,
    RefusedCallers,
    address_of,
)

MANY = int(MOST_PER_S * WINDOW_S) + 1
HERE = ipaddress.ip_address("10.0.0.1")


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refuse(callers: RefusedCallers, count: int, address: str = "10.0.0.1") -> None:
    for number in range(count):
        callers.note(f"ipv4:{address}:{1000 + number}")


def test_address_with_too_many_refused_connections_is_held_off() -> None:
    callers = RefusedCallers(Time())
    refuse(callers, MANY)
    refuse(callers, MANY - 1, "10.0.0.2")
    held, peers = callers.due()
    assert held == {HERE}
    assert peers == {(HERE, port) for port in range(1000, 1000 + MANY)}


def test_flood_in_one_call_is_held_off_at_once() -> None:
    callers = RefusedCallers(Time())
    callers.note_flood("ipv4:10.0.0.1:1000")
    assert callers.due() == ({HERE}, {(HERE, 1000)})
    assert callers.pass_one_in == MOST


def test_connection_may_have_many_refused_calls_but_not_without_end() -> None:
    time = Time()
    callers = RefusedCallers(time)
    for _ in range(int(CALLS.burst)):
        callers.note("ipv4:10.0.0.1:1000")
    assert callers.due() == (set(), set())
    callers.note("ipv4:10.0.0.1:1000")
    assert callers.due() == ({HERE}, {(HERE, 1000)})
    callers = RefusedCallers(time)
    for _ in range(100):
        time.now += 1.0
        for _ in range(int(CALLS.per_second)):
            callers.note("ipv4:10.0.0.1:1000")
        assert callers.due() == (set(), set())


def test_it_is_held_off_as_long_as_it_goes_on() -> None:
    """Only a part of its attempts is seen meanwhile."""
    time = Time()
    callers = RefusedCallers(time)
    refuse(callers, MANY)
    callers.due()
    time.now += HOLD_S - 0.1
    refuse(callers, MANY // callers.pass_one_in + 1)
    assert callers.due()[0] == {HERE}
    time.now += HOLD_S - 0.1
    assert callers.due() == ({HERE}, set())
    time.now += 0.2
    assert callers.due() == (set(), set())


def test_as_many_attempts_pass_as_the_server_can_bear() -> None:
    """Members of the job may have the same address: their attempts are dropped, too."""
    time = Time()
    callers = RefusedCallers(time)
    refuse(callers, MANY)
    callers.due()
    assert callers.pass_one_in == FEWEST
    refuse(callers, 3 * MANY)
    callers.due()
    assert callers.pass_one_in == 8
    refuse(callers, MANY - 1)
    callers.due()
    assert callers.pass_one_in == 8, "as many as it can bear have passed"
    for expected in (4, 2, FEWEST):
        refuse(callers, 1)
        callers.due()
        assert callers.pass_one_in == expected
    refuse(callers, 1000 * MANY)
    callers.due()
    assert callers.pass_one_in == MOST


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5", (HERE, 5)),
        ("ipv6:%5Bfe80::1%5D:5", (ipaddress.ip_address("fe80::1"), 5)),
        ("ipv6:[::ffff:10.0.0.1]:5", (HERE, 5)),
        ("unix:/a/socket", None),
        ("", None),
    ],
)
def test_peers_of_grpc_are_read(peer: str, address: object) -> None:
    assert address_of(peer) == address


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, host = request.param
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        listening.listen(200)
        yield listening


def connected(listener: socket.socket, attempts: int) -> int:
    """How many attempts succeed at once. On the loopback nothing is lost by itself."""
    succeeded = 0
    for _ in range(attempts):
        with socket.socket(listener.family) as one:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            succeeded += one.connect_ex(listener.getsockname()) == 0
    return succeeded


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these filters")
def test_kernel_drops_attempts_to_connect(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    here = ipaddress.ip_address(host)
    others = [ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("fe80::1")]
    with socket.socket(listener.family) as before:
        before.connect(listener.getsockname())
        accepted, _ = listener.accept()
        connect_filter.hold_off(port, others, MOST)
        assert connected(listener, 20) == 20
        connect_filter.hold_off(port, [*others, here], MOST)
        assert connected(listener, 64) < 32, "about 4 are expected"
        before.sendall(b"still open")
        assert accepted.recv(100) == b"still open"
        accepted.close()
    connect_filter.hold_off(port, [], MOST)
    assert connected(listener, 20) == 20
