"""A server that fails, compacts and closes watches: the copy becomes right, and misses no deletion.

Replay a seed with `pytest -k seed3`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from taskd.core.clusterd.reflector import Change, Json, OpenWatch, Pause, Reflector, ReflectorConfig
from tests.sim.reflector_world import World

SEEDS = range(40)


def run(world: World) -> None:
    world.run(until=300.0, trouble=0.2)
    world.run(until=world.now + 60.0, trouble=0.0)


@pytest.mark.parametrize("seed", SEEDS, ids="seed{}".format)
def test_copy_equals_the_server_after_trouble_and_misses_no_deletion(seed: int) -> None:
    world = World(seed)
    run(world)
    assert world.copy == world.server.objects
    assert world.reflector.synced
    assert world.reflector.problem == ""
    assert world.longest_pause_s <= world.config.longest_pause_s


class ForgetsTheGap(Reflector):
    """Planted bug: after 410 the list replaces what is known, and deletions go unreported."""

    def page(self, items: Iterable[Json], version: str, token: str, now: float) -> list[Change]:
        return [change for change in super().page(items, version, token, now) if change.body]


class TakesTheSameNameForTheSameObject(Reflector):
    """Planted bug: what was deleted and created again during a gap is only a change."""

    def page(self, items: Iterable[Json], version: str, token: str, now: float) -> list[Change]:
        changes = super().page(items, version, token, now)
        there = {change.name for change in changes if change.body}
        return [change for change in changes if change.body or change.name not in there]


@pytest.mark.parametrize("bug", [ForgetsTheGap, TakesTheSameNameForTheSameObject])
def test_simulator_finds_planted_bugs(bug: type[Reflector]) -> None:
    def is_found(seed: int) -> bool:
        world = World(seed, bug)
        try:
            run(world)
        except AssertionError:
            return True
        return world.copy != world.server.objects

    assert any(map(is_found, SEEDS))


def reflector() -> Reflector:
    return Reflector(ReflectorConfig(), lambda: 1.0)


def test_server_that_answers_every_watch_with_410_is_not_asked_in_a_hot_loop() -> None:
    one, now, requests = reflector(), 0.0, 0
    while now < 60.0:
        match one.next_action(now):
            case Pause(until):
                now = until
            case OpenWatch():
                requests += 1
                one.event("ERROR", {"code": 410, "message": "too old"}, now)
                one.watch_ended(now)
            case _:
                one.page([], "5", "", now)
    assert requests < 12


def test_watch_that_ends_at_once_is_not_opened_in_a_hot_loop() -> None:
    one, now, requests = reflector(), 0.0, 0
    one.page([], "5", "", now)
    while now < 60.0:
        match one.next_action(now):
            case Pause(until):
                now = until
            case OpenWatch():
                requests += 1
                one.watch_ended(now)
            case _:
                one.page([], "5", "", now)
    assert requests < 12


@pytest.mark.parametrize("code", [0, 403, 500])
def test_watch_that_fails_for_ever_is_replaced_by_lists(code: int) -> None:
    """An event that cannot be read, or the right to watch was taken away."""
    one, now, seen = reflector(), 0.0, 0.0
    problems = set()
    while now < 600.0:
        match one.next_action(now):
            case Pause(until):
                now = until
            case OpenWatch():
                one.failed(code, "no watch", 0.0, now)
                problems.add(one.problem)
            case _:
                one.page([], "5", "", now)
                assert now - seen < 2 * ReflectorConfig().longest_pause_s
                seen = now
    assert problems == {"no watch"}
    assert one.problem == "no watch", "it is not reported as repaired after each list"
    one.watch_opened()
    assert one.problem == ""


def test_pause_that_the_server_asks_for_is_kept() -> None:
    one = reflector()
    one.failed(429, "too many requests", 45.0, 0.0)
    assert one.next_action(0.0) == Pause(45.0)


def test_kind_that_the_server_does_not_know_counts_as_synced_and_is_tried_again() -> None:
    one = reflector()
    one.failed(404, "the server could not find the requested resource", 0.0, 0.0)
    assert one.synced
    assert "could not find" in one.problem
    assert isinstance(one.next_action(0.0), Pause)


def test_refused_list_keeps_what_is_known() -> None:
    one = reflector()
    body = {"metadata": {"namespace": "a", "name": "b", "uid": "1", "resourceVersion": "3"}}
    assert one.page([body], "5", "", 0.0) == [Change("a/b", body)]
    one.failed(403, "forbidden", 0.0, 1.0)
    assert one.problem == "forbidden"
    assert one.page([body], "9", "", 2.0) == []  # a late answer of a list that was given up
