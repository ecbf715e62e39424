"""How nodes draw their ranks, with torch's own store and the kernel's claims."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from torch._C._distributed_c10d import HashStore

from taskd.agent.run.node_ranks import claim, machine
from taskd.agent.run.node_ranks import draw as draw_place
from taskd.agent.run.rendezvous import everywhere, is_here

_jobs = count()


Draw = Callable[[HashStore, str, int, str], tuple[int, socket.socket]]


@pytest.fixture
def job() -> str:
    return f"places-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def draw() -> Iterator[Draw]:
    """What was drawn is held to the test's end."""
    held = []

    def drawing(store: HashStore, job: str, first: int, here: str) -> tuple[int, socket.socket]:
        drawn = draw_place(store, job, first, here)
        held.append(drawn[1])
        return drawn

    yield drawing
    for each in held:
        each.close()


def test_places_are_handed_out_one_by_one(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = [draw(store, job, 1, f"machine{n}") for n in range(3)]
    assert [node for node, _ in drawn] == [1, 2, 3]
    spare, _ = draw(store, job, 4, "machine4")
    assert spare == 4


def test_two_launchers_of_one_machine_are_two_nodes(job: str, draw: Draw) -> None:
    store, here = HashStore(), machine("")
    drawn = [draw(store, job, 1, here) for _ in range(2)]
    assert [node for node, _ in drawn] == [1, 2]


def test_a_dead_launchers_place_is_its_machines(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = {name: draw(store, job, 1, name) for name in ("a", "b")}
    for _, held in drawn.values():
        held.close()  # both have died
    node, _ = draw(store, job, 1, "c")
    assert node == 3, "nobody but the machine itself knows that they are dead"
    assert [draw(store, job, 1, name)[0] for name in ("b", "a")] == [2, 1]


def test_a_place_that_was_given_here_is_not_drawn(job: str, draw: Draw) -> None:
    given = claim(job, 1)
    assert given is not None
    with given:
        assert claim(job, 1) is None
        assert draw(HashStore(), job, 1, machine(""))[0] == 2


def test_one_machine_is_one_until_it_is_named_otherwise() -> None:
    assert machine("") == machine("") != machine("another")


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("127.0.0.9", True), ("192.0.2.1", False), ("no.such.invalid", False)],
)
def test_whose_an_address_is(host: str, own: bool) -> None:
    assert is_here(host) is own


def test_who_is_known_by_ipv6_listens_there() -> None:
    assert everywhere("::1") == "::"
    assert everywhere("127.0.0.1") == everywhere("no.such.invalid") == "0.0.0.0"
