"""Which batch belongs to a step."""

from __future__ import annotations

from taskd.core.worker.epochs import Epochs, Position


def test_known_length_divides_the_steps_into_epochs() -> None:
    epochs = Epochs(count=2, length=3)
    places = [epochs.locate(step) for step in range(7)]
    assert places[:6] == [Position(epoch, index) for epoch in range(2) for index in range(3)]
    assert places[6] is None
    assert [epochs.end(0), epochs.end(1)] == [3, 6]


def test_unknown_length_learns_each_end() -> None:
    epochs = Epochs(count=2, length=None)
    assert epochs.locate(5) == Position(0, 5)
    assert epochs.end(0) is None
    epochs = epochs.ended(0, 4)
    assert epochs.locate(3) == Position(0, 3)
    assert epochs.locate(5) == Position(1, 1)
    epochs = epochs.ended(1, 2)
    assert epochs.end(1) == 6
    assert epochs.locate(6) is None


def test_epochs_without_limit_never_end() -> None:
    assert Epochs(count=None, length=3).locate(3000) == Position(1000, 0)
