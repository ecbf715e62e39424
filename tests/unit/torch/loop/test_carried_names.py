"""Variables that go from one round of a loop to the next are found in the compiled code."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

import pytest

from taskd.torch.loop import carried_names


def frame() -> tuple[object, int]:
    ours = inspect.currentframe()
    assert ours is not None
    assert ours.f_back is not None
    theirs = ours.f_back.f_back
    assert theirs is not None
    return theirs.f_code, theirs.f_lasti


class Found:
    attributes: tuple[tuple[str, str], ...] = ()
    loop: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    attempt: tuple[str, ...] = ()


def steps(found: Found) -> Iterator[int]:
    for number in range(4):
        found.loop = carried_names.of_loop(*frame())
        found.last = carried_names.of_last_round(*frame())
        yield number


class Attempt:
    def __init__(self, found: Found) -> None:
        self.found = found

    def __enter__(self) -> None:
        self.found.attributes = carried_names.attributes_of_innermost_loop(*frame())
        self.found.attempt = carried_names.of_innermost_loop(*frame())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return True


def test_variables_of_a_while_loop_are_found() -> None:
    found, log = Found(), list[object]()
    average, best = 1.0, -1
    rounds = steps(found)
    while True:
        try:
            step = next(rounds)
        except StopIteration:
            break
        loss = average * step
        average = 0.5 * average + loss
        if loss > 1:
            best = step
        log.append(loss)
    assert log
    assert {*found.loop, *found.last} == {"average", "best"}
    assert best >= -1


def test_single_step_has_no_loop() -> None:
    found, count = Found(), 0
    step = next(steps(found))
    count += step
    assert found.loop == ()


def test_variable_is_carried_if_a_round_reads_it_before_it_sets_it() -> None:
    found, log = Found(), list[object]()
    ahead, average, best, time = 1.0, 0.0, 9.0, 0
    for step in steps(found):
        total, rate = 0.0, 0.1 * step
        for attempt in (Attempt(found),):
            with attempt:
                for _ in range(2):
                    loss = ahead * rate
                    ahead = loss + 1
                    total += loss
                average = 0.9 * average + loss
                squares = [one * one for one in range(3)]
        best = min(best, total)
        now = step
        log.append((now - time, loss, squares))
        time = now
        if step > 9:
            break
    assert found.loop == ("ahead", "average", "best", "time")
    assert found.attempt == ("ahead", "average", "total")


def test_iterator_that_is_opened_again_in_a_handler_is_carried() -> None:
    found, data = Found(), iter([1])
    for _ in steps(found):
        for attempt in (Attempt(found),):
            with attempt, suppress(ZeroDivisionError):
                try:
                    batch = next(data)
                except StopIteration:
                    data = iter([1])
                    batch = next(data)
        assert batch == 1
    assert found.loop == ("data",)
    assert found.attempt == ("data",)


def test_variable_of_some_rounds_is_carried() -> None:
    found, penalty = Found(), 0
    for step in steps(found):
        if step % 2 == 0:
            penalty = step
        assert penalty >= 0
    assert found.loop == ("penalty",)


def test_variable_of_some_rounds_that_is_read_after_the_loop_is_carried() -> None:
    found, low, best, stopped, last = Found(), 9.0, -1, -1, -1.0
    for step in steps(found):
        for attempt in (Attempt(found),):
            with attempt:
                loss = 1.0 / (step + 1)
                worst = step if loss > low else 0
                if step == 2:
                    high = step
        if loss < low:
            low, best = loss, step
        if step == 3:
            stopped = step
            break
        last = loss
    assert (best, stopped, last, loss, worst, high) == (3, 3, 1 / 3, 1 / 4, 0, 2)
    assert found.loop == ("best", "high", "last", "low")
    assert found.attempt == ("high",)


def test_what_a_handler_around_the_loop_reads_is_not_carried() -> None:
    found, seen = Found(), list[int]()
    try:
        for step in steps(found):
            loss = step * 2
    except ValueError:
        seen.append(loss)
    finally:
        seen.append(step)
    assert found.loop == ()


def test_what_is_set_after_the_loop_is_not_carried() -> None:
    found, model = Found(), [1]
    for step in steps(found):
        model.append(step)
        if step > 2:
            break
    model = model[:1]
    assert model == [1]
    assert found.loop == ()


def test_long_loop_has_the_same_names_as_a_short_one() -> None:
    lines = "\n".join(f"            x{number} = step + {number}" for number in range(300))
    text = f"""
average = 0
for step in steps(found):
    for attempt in (Attempt(found),):
        with attempt:
{lines}
            for _ in range(2):
                loss = x7
            average += loss
    log.append(loss)
"""
    found = Found()
    exec(text, {"steps": steps, "Attempt": Attempt, "found": found, "log": []})
    assert found.loop == found.attempt == ("average",)


def test_no_loop_no_names() -> None:
    found = Found()
    rounds = steps(found)
    number = next(rounds)
    number += 1
    assert found.loop == ()


class Trainer:
    def __init__(self) -> None:
        self.average, self.last, self.limit, self.count, self.found = 0.0, 0.0, 1.0, 0, Found()

    def train(self) -> None:
        for step in steps(self.found):
            for attempt in (Attempt(self.found),):
                with attempt:
                    self.last = step * self.limit
                    self.average = 0.9 * self.average + self.last
                    self.count += 1


def test_attributes_that_are_carried_are_found() -> None:
    trainer = Trainer()
    trainer.train()
    assert trainer.found.attributes == (("self", "average"), ("self", "count"))
    assert trainer.found.attempt == trainer.found.loop == ()


count = 0


def test_function_that_counts_in_a_variable_outside_is_found() -> None:
    average, last = 0.0, 0.0

    def train(rate: float) -> float:
        global count
        nonlocal average, last
        count += 1
        last = rate
        rate = 2 * last
        average = 0.9 * average + rate
        return average

    assert train(1.0) == 2.0
    assert carried_names.of_function(train.__code__) == ("average", "count")


def test_what_the_rest_of_an_attempt_sets_is_found() -> None:
    rest: frozenset[str] = frozenset()
    total, count = 0.0, 0
    for step in range(2):
        for attempt in range(1):
            begin = sys._getframe().f_lasti
            loss = total + step
            for part in range(2):
                total += loss * (part + 1)
                here = sys._getframe()
                rest = carried_names.set_in_rest(here.f_code, begin, here.f_lasti)
            count += attempt
        last = loss
    assert (last, count, part) == (1.0, 0, 1)
    assert "loss" not in rest
    assert rest >= {"total", "count", "part"}
    assert "last" not in rest


SCRIPT = """
def main(steps, attempt):
    best = None
    for number in steps:
        with attempt:
            best = max(best or 0, number)
    return best

main(steps, attempt)
"""


class Asking:
    """Asks what a rank asks about its loop, at the same places."""

    loop: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    attempt: tuple[str, ...] = ()

    def steps(self) -> Iterator[int]:
        for number in range(3):
            code, at = frame()
            self.loop, self.last = (
                carried_names.of_loop(code, at),
                carried_names.of_last_round(code, at),
            )
            assert carried_names.has_with(code, at)
            assert "best" in carried_names.uses_of_loop(code, at).read
            yield number

    def __enter__(self) -> None:
        self.attempt = carried_names.of_innermost_loop(*frame())

    def __exit__(self, *_: object) -> None:
        pass


def test_script_that_is_known_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    code, asking = compile(SCRIPT, "train.py", "exec"), Asking()
    carried_names.learn(code)

    def read(*_: object) -> None:
        raise AssertionError("the answer is not known yet")

    monkeypatch.setattr(dis, "get_instructions", read)
    exec(code, {"steps": asking.steps(), "attempt": asking})
    assert asking.loop == asking.last == asking.attempt == ("best",)
