"""torch/groups/works.py: handles of collectives, and what becomes of those that fail too late."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.futures import Future

from taskd.torch.groups.all_groups import Groups, Mode
from taskd.torch.groups.works import Guarded


class Pending(dist.Work):
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future


def live(told: list[str]) -> Groups:
    groups = Groups(2, told.append, lambda begun, done: None)
    groups.mode, groups.absorbing = Mode.LIVE, True
    return groups


def test_a_collective_that_fails_breaks_the_groups_and_is_told_once() -> None:
    told: list[str] = []
    groups = live(told)
    first, second = Pending(), Pending()
    works = [Guarded(groups, one, list) for one in (first, second)]
    first.future.set_exception(RuntimeError("connection closed"))
    second.future.set_exception(RuntimeError("connection closed, too"))
    assert groups.mode is Mode.BROKEN
    assert told == ["RuntimeError: connection closed"]
    assert all(work.wait() for work in works)


def test_one_that_was_given_up_long_ago_does_not_break_the_groups_of_today() -> None:
    told: list[str] = []
    groups = live(told)
    forgotten = Pending()
    work = Guarded(groups, forgotten, list)
    work.give_up()
    assert work.wait()
    forgotten.future.set_exception(RuntimeError("timed out"))
    assert groups.mode is Mode.LIVE
    assert told == []


def test_a_step_that_ends_as_the_groups_break_knows_of_it() -> None:
    groups = live([])
    groups.abort(1, "a newer incident")
    assert groups.leave()
    groups = live([])
    assert not groups.leave()
    groups.abort(1, "between steps")
    assert groups.mode is Mode.LIVE, "the script's own collectives run on"
    assert groups.trouble()
