"""What copies cost is measured in the steps themselves."""

from __future__ import annotations

from taskd.core.worker import copy_interval
from taskd.torch.copies.copy_costs import CopyCosts


class Training:
    """Steps of 100 ms that copy, and wait for the copy, as often as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.costs = CopyCosts(lambda: self.now)
        self.costs.stepped(copies=False)

    def step(self, copying: bool, wait_s: float = 0.0, slower_s: float = 0.0) -> None:
        """`copying`: the state of the step before is being copied meanwhile."""
        self.now += 0.1 + (slower_s if copying else 0.0)
        if copying:
            with self.costs.waiting():
                self.now += wait_s

    def run(self, every: int, steps: int, wait_s: float = 0.0, slower_s: float = 0.0) -> None:
        for number in range(steps):
            self.costs.stepped(number % every == 0)
            self.step(number % every == 0, wait_s, slower_s)
        self.costs.stepped(copies=False)


def near(found: tuple[float, float] | None, expected: tuple[float, float]) -> bool:
    return found is not None and all(
        abs(a - b) < 1e-9 for a, b in zip(found, expected, strict=True)
    )


def test_nothing_is_known_before_some_copies_were_made() -> None:
    training = Training()
    assert training.costs.measured() is None
    training.run(1, 2, wait_s=0.2)
    assert training.costs.measured() is None


def test_copy_after_each_step_costs_what_training_waits_for_it() -> None:
    training = Training()
    training.run(1, 12, wait_s=0.2)
    assert near(training.costs.measured(), (0.1, 0.2))


def test_slower_steps_beside_a_copy_count_as_well() -> None:
    training = Training()
    training.run(4, 24, wait_s=0.01, slower_s=0.05)
    assert near(training.costs.measured(), (0.1, 0.06))


def test_pause_between_steps_is_not_measured() -> None:
    training = Training()
    training.run(1, 12, wait_s=0.02)
    for _ in range(9):
        training.costs.forget()
        training.now += 60.0
        training.costs.stepped(copies=True)
    assert near(training.costs.measured(), (0.1, 0.02))


def test_chosen_interval_keeps_training_within_five_percent() -> None:
    training, every = Training(), 1
    for _ in range(6):
        training.run(every, 40, wait_s=0.15, slower_s=0.03)
        measured = training.costs.measured()
        assert measured is not None
        every = copy_interval.agree(every, [copy_interval.propose(*measured)])
    before = training.now
    training.run(every, 10 * every, wait_s=0.15, slower_s=0.03)
    assert every == 64
    assert training.now - before <= 1.05 * 10 * every * 0.1
