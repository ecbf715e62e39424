"""torch/groups/works.py: handles of collectives, and collectives that fail too late."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from taskd.torch.groups.all_groups import Groups, Mode
from taskd.torch.groups.works import GlooWork


class Pending(dist.Work):
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future


def live(reasons: list[str]) -> Groups:
    groups = Groups(2, reasons.append, lambda begun, done: None)
    groups.mode, groups.absorbing = Mode.LIVE, True
    return groups


def test_failed_collective_breaks_the_groups_and_is_reported_once() -> None:
    reasons: list[str] = []
    groups = live(reasons)
    first, second = Pending(), Pending()
    works = [GlooWork(groups, one, list) for one in (first, second)]
    first.future.set_exception(RuntimeError("connection closed"))
    second.future.set_exception(RuntimeError("connection closed, too"))
    assert groups.mode is Mode.BROKEN
    assert reasons == ["RuntimeError: connection closed"]
    assert all(work.wait() for work in works)


def test_late_failure_of_an_abandoned_collective_is_ignored() -> None:
    reasons: list[str] = []
    groups = live(reasons)
    forgotten = Pending()
    work = GlooWork(groups, forgotten, list)
    work.abandon()
    assert work.wait()
    forgotten.future.set_exception(RuntimeError("timed out"))
    assert groups.mode is Mode.LIVE
    assert reasons == []


def test_leaving_a_step_reports_that_the_groups_are_broken() -> None:
    groups = live([])
    groups.abort(1, "a newer incident")
    assert groups.leave_step()
    groups = live([])
    assert not groups.leave_step()
    groups.abort(1, "between steps")
    assert groups.mode is Mode.LIVE, "the script's own collectives run on"
    assert groups.is_broken()


def test_waiting_for_gloo_ends_with_the_last_collective() -> None:
    groups, pending = live([]), [Pending(), Pending()]
    works = [GlooWork(groups, one, list) for one in pending]
    groups.abort(1, "a test")
    assert all(work.wait() for work in works)

    def end() -> None:
        for one in pending:
            one.future.set_result([])

    ended = threading.Thread(target=end)
    ended.start()
    assert groups.wait_for_gloo()
    ended.join()
    assert groups.wait_for_gloo()
