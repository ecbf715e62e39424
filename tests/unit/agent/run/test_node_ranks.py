"""How nodes draw their ranks, with torch's own store and real claims."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from torch.distributed import HashStore

from taskd.agent.run import node_ranks
from taskd.agent.run.node_ranks import claim, machine_id
from taskd.agent.run.node_ranks import draw as draw_rank
from taskd.agent.run.rendezvous import is_local_address, wildcard_address

_jobs = count()


Draw = Callable[[HashStore, str, int, str], tuple[int, socket.socket]]


@pytest.fixture
def job() -> str:
    return f"ranks-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def draw() -> Iterator[Draw]:
    """Claims are held until the test ends."""
    held = []

    def draw_once(store: HashStore, job: str, first: int, here: str) -> tuple[int, socket.socket]:
        drawn = draw_rank(store, job, first, here)
        held.append(drawn[1])
        return drawn

    yield draw_once
    for each in held:
        each.close()


def test_ranks_are_given_out_in_order(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = [draw(store, job, 1, f"machine{n}") for n in range(3)]
    assert [node for node, _ in drawn] == [1, 2, 3]
    spare, _ = draw(store, job, 4, "machine4")
    assert spare == 4


def test_two_launchers_on_one_machine_are_two_nodes(job: str, draw: Draw) -> None:
    store, here = HashStore(), machine_id("")
    drawn = [draw(store, job, 1, here) for _ in range(2)]
    assert [node for node, _ in drawn] == [1, 2]


def test_rank_of_dead_launcher_stays_with_its_machine(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = {name: draw(store, job, 1, name) for name in ("a", "b")}
    for _, held in drawn.values():
        held.close()  # both have died
    node, _ = draw(store, job, 1, "c")
    assert node == 3, "only the machine itself knows that they are dead"
    assert [draw(store, job, 1, name)[0] for name in ("b", "a")] == [2, 1]


def test_rank_claimed_on_this_machine_is_not_drawn(job: str, draw: Draw) -> None:
    claimed = claim(job, 1)
    assert claimed is not None
    with claimed:
        assert claim(job, 1) is None
        assert draw(HashStore(), job, 1, machine_id(""))[0] == 2


def test_machine_id_depends_on_given_name() -> None:
    assert machine_id("") == machine_id("") != machine_id("another")


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("127.0.0.9", True), ("192.0.2.1", False), ("no.such.invalid", False)],
)
def test_local_address_is_recognized(host: str, own: bool) -> None:
    assert is_local_address(host) is own


def test_wildcard_address_has_family_of_host() -> None:
    assert wildcard_address("::1") == "::"
    assert wildcard_address("127.0.0.1") == wildcard_address("no.such.invalid") == "0.0.0.0"


def test_name_of_a_claim_cannot_be_guessed_without_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any user of the machine can take an abstract name that is known."""
    names = set()
    for token in ("one", "another", ""):
        monkeypatch.setenv("TASKD_TOKEN", token)
        names |= {node_ranks._claim_name("job", node) for node in range(2)}
    assert len(names) == 6
    assert not any("job" in name for name in names)
