"""The loop that all processes share, with a clock of its own."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from math import inf

import pytest

from taskd.model.types import Outcome, Tick
from taskd.runtime.driver import Driver, Transition

log = logging.getLogger("taskd.test")


@dataclass(frozen=True)
class Counting:
    count: int
    deadline: float = inf


@dataclass(frozen=True)
class Finished:
    count: int
    deadline: float = inf


State = Counting | Finished
Seen = Transition[State, str, str]


class Process:
    """Counts events; "end" and the deadline end it, "drop" is not for the machine."""

    def __init__(self, deadline: float = inf, *, durable: bool = True) -> None:
        self.now, self.durable = 0.0, durable
        self.order: list[str] = []
        self.inbox: asyncio.Queue[str] = asyncio.Queue()
        self.driver: Driver[State, str, str] = Driver(
            Counting(0, deadline),
            self.step,
            self.perform,
            inbox=self.inbox,
            log=log,
            subject=lambda state: f"incident={state.count}",
            clock=lambda: self.now,
            commit=self.commit,
            before=lambda done: self.note("before", done),
            after=lambda done: self.note("after", done),
        )

    def step(self, state: State, event: str | Tick, now: float) -> Outcome[State, str] | None:
        if event == "drop":
            return None
        if event == "end" or (isinstance(event, Tick) and now >= state.deadline):
            return Outcome(Finished(state.count), (f"stop at {now:g}",), "it is the end")
        return Outcome(Counting(state.count + 1), (f"count {event}",), f"{event} counts")

    async def commit(self, done: Seen) -> bool:
        assert self.driver.state is done.before, "nothing has taken effect yet"
        return self.durable

    async def perform(self, command: str) -> None:
        self.order.append(command)

    def note(self, hook: str, done: Seen) -> None:
        assert self.driver.state is done.outcome.state
        self.order.append(f"{hook} {done.before.count}->{done.outcome.state.count}")

    def run(self, *events: str) -> Finished:
        async def main() -> Finished:
            for event in events:
                self.inbox.put_nowait(event)
            return await self.driver.run_until(Finished)

        return asyncio.run(main())


def test_hooks_and_commands_run_in_order() -> None:
    process = Process()
    assert process.run("one", "end") == Finished(1)
    counted = ["before 0->1", "count one", "after 0->1"]
    assert process.order == [*counted, "before 1->1", "stop at 0", "after 1->1"]


def test_dropped_event_changes_nothing() -> None:
    process = Process()
    assert process.run("drop", "end") == Finished(0)
    assert process.order == ["before 0->0", "stop at 0", "after 0->0"]


def test_deadline_in_the_past_gives_a_tick() -> None:
    process = Process(deadline=5.0)
    process.now = 7.0
    assert process.run() == Finished(0)
    assert "stop at 7" in process.order


def test_waiting_event_goes_before_the_tick() -> None:
    process = Process(deadline=5.0)
    process.now = 7.0
    assert process.run("one", "end") == Finished(1)


def test_outcome_that_is_not_committed_has_no_effect() -> None:
    async def main() -> None:
        process = Process(durable=False)
        process.inbox.put_nowait("end")
        running = asyncio.create_task(process.driver.run())
        await process.inbox.join()
        running.cancel()
        assert process.driver.state == Counting(0)
        assert process.order == []

    asyncio.run(main())


def test_join_waits_until_commands_are_done() -> None:
    async def main() -> None:
        process = Process()
        running = asyncio.create_task(process.driver.run())
        process.inbox.put_nowait("one")
        await process.inbox.join()
        running.cancel()
        assert process.order[-1] == "after 0->1"

    asyncio.run(main())


def test_log_shows_subject_states_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, log.name)
    Process().run("one", "end")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "incident=1 Counting: one counts"),
        ("INFO", "incident=1 Counting -> Finished: it is the end"),
    ]
