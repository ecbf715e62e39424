"""What steps change in place is found through the code of the loop."""

from __future__ import annotations

import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from taskd.torch.loop.attempt_values import OBJECTS
from taskd.torch.loop.loop_variables import LoopVariables
from taskd.torch.loop.object_kinds import MAX_PLAIN

seen: list[int] = []
calls = 0


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        self.total += value


def count() -> None:
    global calls
    calls += 1
    seen.append(calls)


def turns(variables: LoopVariables, first: int, joins: bool) -> Iterator[int]:
    for number in range(first, first + 3):
        variables.begin_turn(number, joins=joins and number == first)
        yield number


def script(variables: LoopVariables, first: int, joins: bool) -> list[object]:
    """What the second process finds in its first turn."""
    global calls
    calls = 0
    seen.clear()
    losses, stats, meter, inner = list[float](), {"n": 0}, Meter(), 0

    def inside() -> None:
        nonlocal inner
        inner += 1

    for number in turns(variables, first, joins):
        if joins:
            return [losses, stats, meter.total, calls, list(seen), inner]
        losses.append(float(number))
        stats["n"] += 1
        meter.update(2.0)
        count()
        inside()
    return []


def test_next_process_begins_with_the_objects_of_the_last_one(tmp_path: Path) -> None:
    script(LoopVariables(tmp_path, 0), 0, joins=False)
    found = script(LoopVariables(tmp_path, 0), 2, joins=True)
    assert found == [[0.0, 1.0], {"n": 2}, 4.0, 2, [1, 2], 2]


def test_attempt_is_undone_in_objects_and_in_global_variables(tmp_path: Path) -> None:
    global calls
    calls = 0
    seen.clear()
    variables, losses, meter = LoopVariables(tmp_path, 0), list[int](), Meter()
    for number in turns(variables, 0, joins=False):
        for is_good in (False, True):
            variables.objects.begin_attempt()
            losses.append(number)
            meter.update(1.0)
            count()
            if not is_good:
                variables.objects.undo()
    assert losses == [0, 1, 2]
    assert (meter.total, calls, seen) == (3.0, 3, [1, 2, 3])


def test_object_that_the_loop_also_replaces_is_undone(tmp_path: Path) -> None:
    variables, stats, seen_at_end = LoopVariables(tmp_path, 0), {"n": 0}, []
    for number in turns(variables, 0, joins=False):
        for is_good in (False, True):
            variables.objects.begin_attempt()
            stats["n"] += 1
            if not is_good:
                variables.objects.undo()
        seen_at_end.append(stats["n"])
        if number == 1:
            stats = {"n": 0}
    assert seen_at_end == [1, 2, 1]


def test_object_that_is_too_large_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables, losses, constant = LoopVariables(tmp_path, 0), [0] * MAX_PLAIN, [0] * 2 * MAX_PLAIN
    with caplog.at_level(logging.WARNING):
        for number in turns(variables, 0, joins=False):
            losses.append(number + constant[number])
    assert caplog.text.count("losses changes from step to step and is not kept") == 1
    assert "constant" not in caplog.text


def test_full_deque_that_takes_new_items_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables, full = LoopVariables(tmp_path, 0), deque([0] * 2 * MAX_PLAIN, maxlen=2 * MAX_PLAIN)
    with caplog.at_level(logging.WARNING):
        for number in turns(variables, 0, joins=False):
            full.append(number)
    assert caplog.text.count("full changes from step to step and is not kept") == 1


class Average:
    """A hand-made moving average of weights."""

    def __init__(self) -> None:
        self.shadow = {"weight": torch.zeros(2000)}

    def update(self) -> None:
        self.shadow["weight"] = self.shadow["weight"] + 1


def test_what_is_too_large_is_named_if_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables, average, bank = LoopVariables(tmp_path, 0), Average(), torch.zeros(2000)
    rows, constant, device = np.zeros(2000), torch.zeros(2000), torch.zeros(2, device="meta")
    with caplog.at_level(logging.WARNING):
        for number in turns(variables, 0, joins=False):
            average.update()
            bank[number] += constant[number]
            rows[number] += 1
            device.add(1)
    named = [one.args[0] for one in caplog.records if isinstance(one.args, tuple)]
    assert named == ["average", "bank", "rows"]


class Prefetcher:
    """A thread fills its queue."""

    def __init__(self) -> None:
        self.batches, self.taken = Queue[int](), 0

    def take(self) -> None:
        self.taken += 1


def test_object_that_threads_use_is_named_if_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables, data, other = LoopVariables(tmp_path, 0), Prefetcher(), Prefetcher()
    with caplog.at_level(logging.WARNING):
        for _ in turns(variables, 0, joins=False):
            data.take()
            other.batches.qsize()
    named = [one.args for one in caplog.records if isinstance(one.args, tuple)]
    assert named == [("data", "other threads or processes use it")]


class Color(Enum):
    RED = 1
    BLUE = 2


def with_others(variables: LoopVariables, first: int, joins: bool) -> list[object]:
    best, color, counts = Path("first"), Color.RED, {0: 0, 1: 0}
    for number in turns(variables, first, joins):
        if joins:
            return [best, color, counts]
        best = best.parent / str(number)
        color = Color.BLUE if color is Color.RED else color
        counts = {one: count + 1 for one, count in counts.items()}
    return []


def test_next_process_begins_with_paths_enumerations_and_keys_of_the_last_one(
    tmp_path: Path,
) -> None:
    with_others(LoopVariables(tmp_path, 0), 0, joins=False)
    found = with_others(LoopVariables(tmp_path, 0), 2, joins=True)
    assert found == [Path("1"), Color.BLUE, {0: 2, 1: 2}]


def test_scheduler_that_was_forgotten_is_named(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    scheduler, meter = torch.optim.lr_scheduler.StepLR(optimizer, 1), Meter()
    meter.other = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[attr-defined]
    variables = LoopVariables(tmp_path, 0)
    variables.objects.leave_to_others(optimizer)
    found = []
    for _ in turns(variables, 0, joins=False):
        optimizer.step()
        scheduler.step()
        meter.update(1.0)
        found.append(variables.objects.forgotten())
        variables.objects.leave_to_others(scheduler, vars(meter)["other"])
    assert found == [["meter.other", "scheduler"], [], []]


class Counting(torch.optim.SGD):
    """An optimizer of the script that remembers more than its state."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters)
        self.calls, self.rates, self.parameters = 0, list[float](), parameters

    def count(self) -> None:
        self.calls += 1
        self.rates.append(0.1 * self.calls)
        self.last = self.calls


def optimize(variables: LoopVariables, first: int, joins: bool) -> Counting:
    optimizer = Counting([torch.nn.Parameter(torch.ones(2))])
    variables.objects.leave_to_others(optimizer)
    variables.objects.add_optimizers([optimizer])
    for _ in turns(variables, first, joins):
        if joins:
            break
        variables.objects.begin_attempt()
        optimizer.count()
        optimizer.count()
        variables.objects.undo()
        optimizer.count()
    return optimizer


def test_counters_of_an_optimizer_of_the_script_are_kept(tmp_path: Path) -> None:
    assert optimize(LoopVariables(tmp_path, 0), 0, joins=False).calls == 3
    new = optimize(LoopVariables(tmp_path, 0), 2, joins=True)
    assert (new.calls, new.rates, new.last) == (2, [0.1, 0.2], 2)
    assert len(new.parameters) == 1


def patient(
    variables: LoopVariables,
    joins: bool,
    keep: Callable[[dict[str, Any]], None],
    read: Callable[[int], dict[str, Any]],
) -> list[object]:
    """What one step has counted, the next one sets back."""
    meter, stats, log = Meter(), dict[str, int](), list[int]()
    for number in turns(variables, 1 if joins else 0, joins):
        if joins:
            variables.objects.put(read(number)[OBJECTS])
            return [meter.total, stats, log]
        if number == 0:
            meter.update(2.0)
            stats["n"] = 1
            log.append(number)
        else:
            meter.total = 0.0
            stats.clear()
            log.clear()
        keep(variables.written())
    return []


def test_what_an_attempt_sets_back_is_set_back_in_a_replacement(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    patient(LoopVariables(tmp_path, 0), False, kept.append, kept.__getitem__)
    new = patient(LoopVariables(tmp_path, 0), True, kept.append, kept.__getitem__)
    assert new == [0.0, {}, []]


class Annealed(torch.nn.Module):
    """A model of the script that remembers more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.usage, self.drop = 1.0, list[float](), torch.nn.Dropout(0.5)

    def forward(self) -> None:
        self.temperature /= 2
        self.usage.append(self.temperature)
        self.last = len(self.usage)


def anneal(variables: LoopVariables, first: int, joins: bool) -> Annealed:
    net = Annealed()
    variables.objects.leave_to_others(*net.modules())
    variables.objects.add_models([net])
    for _ in turns(variables, first, joins):
        if joins:
            break
        variables.objects.begin_attempt()
        net()
        net.drop.p /= 2
        variables.objects.undo()
        net()
        net.drop.p /= 2
    return net


def test_attributes_of_a_model_are_kept(tmp_path: Path) -> None:
    last = anneal(LoopVariables(tmp_path, 0), 0, joins=False)
    assert (last.temperature, last.usage, last.last) == (0.125, [0.5, 0.25, 0.125], 3)
    assert last.drop.p == 0.0625
    new = anneal(LoopVariables(tmp_path, 0), 2, joins=True)
    assert (new.temperature, new.usage, new.last) == (0.25, [0.5, 0.25], 2)
    assert new.drop.p == 0.125


def smoothing() -> tuple[Callable[[float], None], Callable[[], object]]:
    average, rows = 0.0, list[float]()

    def add(value: float) -> None:
        nonlocal average
        average = (average + value) / 2
        rows.append(average)

    return add, lambda: (average, rows)


class Total:
    value, rows = 0, list[int]()

    def add(self) -> None:
        Total.value += 1
        self.rows.append(Total.value)


def hidden(variables: LoopVariables, first: int, joins: bool) -> list[object]:
    def remember(number: int, store: list[int] = []) -> list[int]:  # noqa: B006
        store.append(number)
        remember.calls += 1  # type: ignore[attr-defined]
        return store

    remember.calls = 0  # type: ignore[attr-defined]
    Total.value, Total.rows = 0, []
    add, read = smoothing()
    hooks, total = [add], Total()

    def step(number: int) -> None:
        for hook in hooks:
            hook(1.0)
        remember(number)
        total.add()

    for number in turns(variables, first, joins):
        if not joins:
            variables.objects.begin_attempt()
            step(number)
            variables.objects.undo()
            step(number)
            continue
        calls = vars(remember)["calls"]
        return [read(), (remember.__defaults__ or ())[0], calls, Total.value, Total.rows]
    return []


def test_what_functions_and_classes_keep_is_there_in_the_next_process(tmp_path: Path) -> None:
    hidden(LoopVariables(tmp_path, 0), 0, joins=False)
    found = hidden(LoopVariables(tmp_path, 0), 2, joins=True)
    assert found == [(0.75, [0.5, 0.75]), [0, 1], 2, 2, [1, 2]]


ENGINE = """
import helper
seen, losses = 0, []

def train(number):
    global seen
    seen += 1
    losses.append(number)
    helper.note()
"""
HELPER = """
stats, count, limit = {"n": 0}, 0, 7

def note():
    stats["n"] += 1
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Imports the modules of a script, as in a new process."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)

    def load() -> Any:
        for name in ("engine", "helper"):
            sys.modules.pop(name, None)
        return importlib.import_module("engine"), importlib.import_module("helper")

    yield load
    for name in ("engine", "helper"):
        sys.modules.pop(name, None)


def with_modules(
    variables: LoopVariables, first: int, joins: bool, load: Callable[[], Any]
) -> list[object]:
    engine, helper = load()
    for number in turns(variables, first, joins):
        if joins:
            return [engine.seen, engine.losses, helper.stats, helper.count, helper.limit]
        variables.objects.begin_attempt()
        engine.train(number)
        helper.count += 1
        variables.objects.undo()
        engine.train(number)
        helper.count += 1
    return []


def test_global_variables_of_other_modules_of_the_script_are_kept(
    tmp_path: Path, modules: Callable[[], Any]
) -> None:
    with_modules(LoopVariables(tmp_path, 0), 0, False, modules)
    found = with_modules(LoopVariables(tmp_path, 0), 2, True, modules)
    assert found == [2, [0, 1], {"n": 2}, 2, 7]
