"""What counts the rounds of a loop beside the steps is found."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from taskd.torch.loop.loop_counters import names_around


class Steps:
    def __init__(self) -> None:
        self.found: list[str] = []
        self.iterator = self._steps()

    def _steps(self) -> Iterator[int]:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "loop":
            frame = frame.f_back
        self.found = names_around(self.iterator, frame)
        yield 0


def bar(steps: Iterable[Any]) -> Iterator[Any]:
    yield from steps


def slow_bar(steps: Iterable[Any]) -> Iterator[Any]:
    for step in steps:  # noqa: UP028
        yield step


@pytest.mark.parametrize(
    ("around", "names"),
    [
        (iter, []),
        (slow_bar, []),
        (lambda steps: map(str, steps), []),
        (enumerate, ["enumerate"]),
        (lambda steps: enumerate(map(str, steps)), ["enumerate"]),
        (lambda steps: enumerate(slow_bar(steps)), ["enumerate"]),
        (lambda steps: slow_bar(bar(enumerate(steps))), ["enumerate"]),
        (lambda steps: zip(steps, [0.1, 0.2], strict=False), ["zip"]),
        (lambda steps: zip([0.1, 0.2], slow_bar(steps), strict=False), ["zip"]),
        (lambda steps: itertools.islice(steps, 3), ["islice"]),
    ],
)
def test_counter_around_the_steps_is_found(
    around: Callable[[Iterator[int]], Iterable[Any]], names: list[str]
) -> None:
    steps = Steps()
    other = enumerate([1, 2])

    def loop() -> None:
        for _ in around(steps.iterator):
            pass

    loop()
    assert steps.found == names
    assert next(other) == (0, 1)
