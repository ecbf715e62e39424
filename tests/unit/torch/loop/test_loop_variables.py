"""Variables of a loop are kept for the next process of the same rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from taskd.torch.loop.attempt_values import calling_frame
from taskd.torch.loop.loop_variables import LoopVariables, Undone, unprotected_attributes


def turns(variables: LoopVariables, first: int, joins: bool) -> Iterator[int]:
    for number in range(first, first + 3):
        variables.begin_turn(number, joins=joins and number == first)
        yield number


def test_next_process_begins_with_the_variables_of_the_last_one(tmp_path: Path) -> None:
    average, hidden = 1.0, torch.zeros(3)
    last = LoopVariables(tmp_path, 0)
    for _ in turns(last, 0, joins=False):
        average, hidden = average / 2, hidden + 1
    state, kept = last.state_dict(), average
    assert list(state) == ["hidden"], "numbers are not part of the state that ranks exchange"

    average, hidden = 1.0, torch.zeros(3)
    new = LoopVariables(tmp_path, 0)
    for number in turns(new, 2, joins=True):
        if number == 2:
            new.load_state_dict(state)
            assert average == 0.25
            assert torch.equal(hidden, torch.full((3,), 3.0))
        average, hidden = average / 2, hidden + 1
    assert kept == 0.125


def rounds_and_end(variables: LoopVariables, *numbers: int, joins: bool) -> Iterator[int]:
    for number in numbers:
        variables.begin_turn(number, joins=False)
        yield number
    variables.begin_turn(3, joins=joins)


def test_process_after_the_loop_has_what_the_last_step_has_set(tmp_path: Path) -> None:
    last, best, final = LoopVariables(tmp_path, 0), -1, -1
    for number in rounds_and_end(last, 0, 1, 2, joins=False):
        final, batch = number * 2, torch.ones(3)
        if number == 1:
            best = number
    assert last.state_dict() == {}, "a batch is not a part of the state"
    assert (final, best, len(batch)) == (4, 1, 3)

    last, best, final = LoopVariables(tmp_path, 0), -1, -1
    for number in rounds_and_end(last, joins=True):
        final, batch = number * 2, torch.ones(3)
        if number == 1:
            best = number
    assert (final, best) == (4, 1)


def numbered(rounds: Iterator[int]) -> Iterator[tuple[int, int]]:
    count = 0
    for number in rounds:
        yield count, number
        count += 2


def test_generator_around_the_steps_is_not_the_loop(tmp_path: Path) -> None:
    average, last = 1.0, LoopVariables(tmp_path, 0)
    for _, number in numbered(turns(last, 0, joins=False)):
        average /= 1 + number
        assert last.names == ("average",)


def looped_in_a_generator(variables: LoopVariables) -> Iterator[float]:
    average = 1.0
    for number in turns(variables, 0, joins=False):
        with Block():
            average /= 1 + number
        yield average


def test_generator_with_the_attempts_is_the_loop(tmp_path: Path) -> None:
    variables, best = LoopVariables(tmp_path, 0), 9.0
    for value in looped_in_a_generator(variables):
        best = min(best, value)
        assert variables.names == ("average",)
    assert best < 1


def test_values_that_are_lost_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = 1.0
    with caplog.at_level(logging.WARNING):
        for _ in turns(LoopVariables(tmp_path, 0), 7, joins=True):
            average /= 2
    assert "had in average at step 7 is not known" in caplog.text


def test_iterator_that_goes_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = iter([1])
    with caplog.at_level(logging.WARNING):
        for _ in turns(LoopVariables(tmp_path, 0), 0, joins=False):
            try:
                next(data)
            except StopIteration:
                data = iter([1])
    assert caplog.text.count("the iterator 'data' goes from one step to the next") == 1


class Block:
    def __enter__(self) -> Block:
        frame = calling_frame()
        self.undone = Undone(frame)
        self.attributes = unprotected_attributes(frame, [])
        return self

    def __exit__(self, *_: object) -> None: ...


class Layer(torch.nn.Module):
    count = 0


def test_abandoned_attempt_is_undone_in_variables(tmp_path: Path) -> None:
    total, log, layer = torch.zeros(2), [0], Layer()
    trainer = SimpleNamespace(count=0)
    for block in (Block(), Block()):
        with block:
            total += 1
            log += [1]
            layer.count += 1
            trainer.count += 1
        block.undone.restore()
        assert torch.equal(total, torch.zeros(2))
        assert log == [0]
        assert block.attributes == ["layer.count"], "objects of the script are kept"


def test_abandoned_attempt_leaves_the_same_objects() -> None:
    losses, rows, noise = [0], np.zeros(2), torch.zeros(2, requires_grad=True)
    seen, view, first = {"losses": losses}, rows[:], noise
    for block in (Block(),):
        with block:
            losses += [1]
            rows += 1
            noise = (noise + 1).detach()
        block.undone.restore()
    losses += [2]
    assert seen == {"losses": [0, 2]}
    assert (view is not rows, view.base is rows, view.sum()) == (True, True, 0)
    assert noise is first
    assert noise.requires_grad


def test_next_process_trains_the_same_tensors(tmp_path: Path) -> None:
    noise, variables = torch.zeros(3, requires_grad=True), LoopVariables(tmp_path, 0)
    for _ in turns(variables, 0, joins=False):
        variables.load_state_dict({"noise": torch.ones(3)})
        assert noise.requires_grad
        noise = (noise * 2).detach().requires_grad_()


def test_iterator_that_steps_advance_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables, data = LoopVariables(tmp_path, 0), (number for number in range(9))
    rows = iter([1, 2, 3])
    with caplog.at_level(logging.WARNING):
        for _ in turns(variables, 0, joins=False):
            next(data)
            next(rows)
    named = [one.args[0] for one in caplog.records if isinstance(one.args, tuple)]
    assert named == ["data", "rows"]


def attempts(variables: LoopVariables) -> Iterator[int]:
    for number in turns(variables, 0, joins=False):
        with nullcontext():
            loss = 2 * number
        yield loss


def test_loop_over_a_generator_with_the_attempts_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worst, losses = 0, list[int]()
    with caplog.at_level(logging.WARNING):
        for loss in attempts(LoopVariables(tmp_path, 0)):
            worst = max(worst, loss)
            losses.append(loss)
    assert caplog.text.count("the attempts are in the generator attempts()") == 1
    assert "would not get: losses, worst." in caplog.text
