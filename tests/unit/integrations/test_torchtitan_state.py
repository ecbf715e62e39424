"""The dataloader of torchtitan: a repeated step gets its batches again, a replacement reads on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from taskd.errors import SettingsError
from taskd.integrations.torchtitan_state import DataPart, TrainerPart

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbers(IterableDataset[Any]):
    """0, 1, 2, …, with a position that can be saved."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.next += 1
            yield {"input": torch.tensor(self.next - 1)}, torch.tensor(0)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def part() -> DataPart:
    loader = StatefulDataLoader(Numbers(), batch_size=None)
    return DataPart(loader, lambda: iter(loader))


def numbers(part: DataPart, count: int = 2) -> list[int]:
    return [int(inputs["input"]) for inputs, _ in part.take(count)]


def test_repeated_step_gets_its_batches_again() -> None:
    data = part()
    assert numbers(data) == [0, 1]
    before = data.state_dict()
    assert numbers(data) == [2, 3]
    data.load_state_dict(before)
    assert numbers(data) == [2, 3]
    assert numbers(data) == [4, 5]


def test_state_that_is_already_there_changes_nothing() -> None:
    data = part()
    assert numbers(data) == [0, 1]
    data.load_state_dict(data.state_dict())
    assert numbers(data) == [2, 3]


def test_replacement_reads_on_where_its_predecessor_was() -> None:
    predecessor, replacement = part(), part()
    assert numbers(predecessor) == [0, 1]
    assert numbers(predecessor) == [2, 3]
    replacement.load_state_dict(predecessor.state_dict())
    assert numbers(replacement) == [4, 5]
    numbers(predecessor)
    assert replacement.state_dict() == predecessor.state_dict()


def test_loader_goes_back_to_an_earlier_step() -> None:
    data = part()
    start = data.state_dict()
    assert [numbers(data) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    data.load_state_dict(start)
    assert numbers(data) == [0, 1]


def test_batch_that_a_step_has_changed_is_read_again() -> None:
    data = part()
    before = data.state_dict()
    for inputs, labels in data.take(2):
        inputs["input"].add_(10)
        inputs["more"] = labels
    data.load_state_dict(before)
    again = list(data.take(2))
    assert [set(inputs) for inputs, _ in again] == [{"input"}, {"input"}]
    assert [int(inputs["input"]) for inputs, _ in again] == [0, 1]
    assert numbers(data) == [2, 3]


def test_loader_without_a_position_is_refused() -> None:
    class Forgetful:
        def state_dict(self) -> dict[str, int]:
            return {}

    data = DataPart(Forgetful(), lambda: iter([({"input": torch.tensor(1)}, 1)]))
    with pytest.raises(SettingsError, match="Forgetful does not change when a batch is read"):
        data.take(1)


def test_trainer_part_brings_back_all_but_the_number_of_the_step() -> None:
    class Trainer:
        step, tokens = 3, 100

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step, "tokens": self.tokens}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step, self.tokens = state["step"], state["tokens"]

    trainer, other = Trainer(), Trainer()
    before = TrainerPart(trainer, 6)
    before.logged.append(((3, 0.5), {}))
    other.step, other.tokens = 9, 900
    after = TrainerPart(other, 30)
    after.load_state_dict(before.state_dict())
    assert (other.step, other.tokens, after.logged) == (9, 100, [((3, 0.5), {})])
    assert after.total == 6
