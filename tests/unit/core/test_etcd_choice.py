"""Whether a job starts an etcd of its own: what each node has, and what node 0 chooses."""

from __future__ import annotations

from itertools import permutations

import pytest

from taskd.core.etcd_choice import (
    DoWithout,
    End,
    Heard,
    JoinRunning,
    Offer,
    Runs,
    Stopped,
    UseEtcd,
    Wait,
    choose,
)

HERE = Offer("node 0")
NO_ETCD = "etcd is not installed"


def can(node: int) -> Offer:
    return Offer(f"node {node}")


def cannot_keep(node: int) -> Offer:
    return Offer(f"node {node}", cannot_keep=NO_ETCD)


def cannot_use(node: int) -> Offer:
    return Offer(f"node {node}", cannot_use="the library `cryptography` is not installed")


@pytest.mark.parametrize(
    ("nodes", "heard", "expected"),
    [
        (3, [], Wait(2)),
        (3, [can(1)], Wait(1)),
        (3, [can(1), can(2)], UseEtcd),
        (4, [can(1), can(2), cannot_keep(3)], UseEtcd),
        (4, [cannot_keep(1), cannot_keep(2), can(3)], DoWithout),
        (3, [can(1), cannot_keep(2)], DoWithout),
        (3, [can(1), cannot_keep(2), Offer("a spare", regular=False)], UseEtcd),
        (3, [Offer("a spare", regular=False)], Wait(2)),
        (3, [can(1), Offer("a witness", regular=False)], Wait(1)),
        (2, [can(1)], DoWithout),
        (2, [can(1), Offer("a witness", regular=False)], UseEtcd),
        (1000, [can(node) for node in range(1, 1000)], UseEtcd),
    ],
)
def test_job_starts_an_etcd_if_three_nodes_can_keep_a_copy(
    nodes: int, heard: list[Heard], expected: Wait | type[UseEtcd | DoWithout]
) -> None:
    found = choose(nodes, HERE, heard)
    assert expected in (found, type(found))


def test_job_does_without_as_soon_as_one_node_cannot_use_it() -> None:
    """Such a node could not follow the job to another leader; there is nothing to wait for."""
    found = choose(5, HERE, [can(1), cannot_use(4)])
    assert isinstance(found, DoWithout)
    assert "node 4 cannot use it: the library `cryptography`" in found.because


@pytest.mark.parametrize(
    "here",
    [Offer("node 0", cannot_keep=NO_ETCD), Offer("node 0", cannot_use=NO_ETCD)],
)
def test_job_does_without_if_node_zero_cannot_start_it(here: Offer) -> None:
    found = choose(3, here, [])
    assert isinstance(found, DoWithout)
    assert found.because.startswith("node 0 ")
    assert NO_ETCD in found.because


def test_reason_names_a_node_that_cannot_keep_a_copy() -> None:
    found = choose(3, HERE, [can(1), cannot_keep(2)])
    assert isinstance(found, DoWithout)
    assert "only 2 of 3 nodes" in found.because
    assert f"node 2: {NO_ETCD}" in found.because


def test_node_zero_that_is_started_again_does_as_the_running_job() -> None:
    assert isinstance(choose(3, HERE, [Runs()]), DoWithout)
    assert choose(3, HERE, [Runs(("b:1", "c:2"))]) == JoinRunning(("b:1", "c:2"))
    assert isinstance(choose(3, HERE, [can(1), can(2), Runs()]), DoWithout)


def test_node_that_is_stopped_ends_the_job() -> None:
    assert choose(3, HERE, [can(1), Stopped("node 2 was stopped")]) == End("node 2 was stopped")


def test_choice_does_not_depend_on_who_was_heard_first() -> None:
    said: list[Heard] = [can(1), cannot_use(2), cannot_keep(3), Runs(("b:1",)), Stopped("a signal")]
    for size in range(len(said) + 1):
        kinds: dict[frozenset[Heard], set[type]] = {}
        for order in permutations(said, size):
            kinds.setdefault(frozenset(order), set()).add(type(choose(4, HERE, order)))
        assert all(len(found) == 1 for found in kinds.values())


def test_waiting_ends_in_the_same_choice_whatever_comes_first() -> None:
    """A node is never told to use etcd before all have said that they can."""
    said = [can(1), can(2), cannot_keep(3)]
    for order in permutations(said):
        assert [type(choose(4, HERE, order[:count])) for count in range(4)] == [
            *[Wait] * 3,
            UseEtcd,
        ]
