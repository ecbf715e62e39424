"""The content of a script's objects is put back, or into the objects of another process."""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from taskd.torch.loop.object_content import Content
from taskd.torch.loop.object_kinds import MAX_PARTS, MAX_PLAIN, is_changeable
from taskd.torch.loop.object_reader import put
from taskd.torch.loop.object_writer import write
from taskd.torch.loop.written_objects import SAME, NotPlain, changed


class Phase(Enum):
    WARM = 1
    COLD = 2


class Meter:
    def __init__(self) -> None:
        self.total, self.values, self.last = 0.0, list[float](), torch.zeros(())
        self.phase, self.model = Phase.WARM, torch.nn.Linear(1, 1)

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)
        self.last += value
        self.phase = Phase.COLD


class OwnDict(dict[str, int]): ...


class OwnList(list[int]): ...


class Number(int): ...


@dataclass(slots=True)
class Slots:
    total: int = 0

    def add(self, value: int) -> None:
        self.total += value


class NeedsValue:
    def __new__(cls, value: int) -> NeedsValue:
        return super().__new__(cls)


class Alias:
    def __init__(self) -> None:
        self.last = self.now = torch.zeros(2)
        self.other: list[Any] = []


def nested() -> defaultdict[str, int]:
    return defaultdict(int)


class Transition(NamedTuple):
    state: torch.Tensor
    rewards: list[float]


def change_list(value: list[Any]) -> None:
    value.append(3)
    value[0]["inner"] += 1


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [{"inner": 1}], change_list),
    "dict": (lambda: {"correct": 0}, lambda one: one.update(correct=1)),
    "set": (lambda: {1}, lambda one: one.add(2)),
    "deque": (lambda: deque([1.0, 2.0], maxlen=2), lambda one: one.append(3.0)),
    "counter": (Counter, lambda one: one.update("ab")),
    "default": (lambda: defaultdict(list), lambda one: one["a"].append(1)),
    "meter": (Meter, lambda one: one.update(2.0)),
    "tuple": (lambda: ([1], [2]), lambda one: one[0].append(5)),
    "named tuple": (lambda: Transition(torch.zeros(1), [1.0]), lambda one: one.rewards.append(2.0)),
    "replay memory": (
        lambda: deque([Transition(torch.zeros(1), [1.0])], maxlen=1),
        lambda one: one.append(Transition(torch.ones(1), [2.0])),
    ),
    "tensor": (lambda: torch.zeros(3), lambda one: one.add_(1)),
    "array": (lambda: np.zeros(3), lambda one: one.__iadd__(1)),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand(1, generator=one)),
    "python": (lambda: random.Random(1), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda one: one.random()),
    "philox": (
        lambda: np.random.Generator(np.random.Philox(1)),
        lambda one: one.random(),
    ),
    "own dict": (lambda: OwnDict(a=1), lambda one: one.update(b=2)),
    "own list": (lambda: OwnList([1]), lambda one: one.append(2)),
    "slots": (lambda: Slots(), lambda one: one.add(1)),
    "path": (lambda: {"best": None}, lambda one: one.update(best=Path("a"))),
    "steps as keys": (dict, lambda one: one.update({Number(1): 1})),
    "other keys": (dict, lambda one: one.update({(1, Phase.COLD): 1})),
    "nested default": (lambda: defaultdict(nested), lambda one: one["a"].update(b=1)),
    "old numpy": (lambda: np.random.RandomState(1), lambda one: one.rand()),
}


@pytest.fixture(params=sorted(OBJECTS))
def pair(request: pytest.FixtureRequest) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return OBJECTS[request.param]


def seen(value: Any) -> bytes:
    """What the content is, whatever the type."""
    return pickle.dumps(write(value, ()))


def test_content_is_put_back_into_the_same_object(pair: Any) -> None:
    new, change = pair
    value = new()
    before, content = seen(value), Content([value], ())
    change(value)
    assert seen(value) != before
    content.put_back()
    assert seen(value) == before


def test_content_is_put_into_the_object_of_another_process(pair: Any) -> None:
    new, change = pair
    value, other = new(), new()
    change(value)
    written = pickle.loads(seen(value))
    assert seen(put(written, other)) == seen(value)
    assert is_changeable(value)


def test_content_that_is_put_twice_is_the_same(pair: Any) -> None:
    new, change = pair
    value, other = new(), new()
    change(value)
    for _ in range(2):  # when the turn begins, and with what the attempts have left
        other = put(pickle.loads(seen(value)), other)
    assert seen(other) == seen(value)


def test_objects_of_other_kinds_stay(pair: Any) -> None:
    value, other = Meter(), Meter()
    value.update(1.0)
    model = other.model
    assert put(pickle.loads(seen(value)), other) is other
    assert other.model is model
    assert (other.total, other.values, other.phase) == (1.0, [1.0], Phase.COLD)


def test_new_objects_of_the_script_are_made() -> None:
    written = write([SimplePoint(1), SimplePoint(2)], ())
    there = put(pickle.loads(pickle.dumps(written)), [])
    assert [one.x for one in there] == [1, 2]


class SimplePoint:
    def __init__(self, x: int) -> None:
        self.x = x


def test_named_tuple_keeps_the_objects_that_are_there() -> None:
    there = Transition(torch.zeros(1), [1.0])
    filled = put(write(Transition(torch.ones(1), [2.0]), ()), there)
    assert isinstance(filled, Transition)
    assert filled.state is there.state
    assert (filled.state.item(), filled.rewards) == (1.0, [2.0])


def test_named_tuple_of_another_class_is_refused() -> None:
    written = write(Transition(torch.ones(1), [2.0]), ())
    with pytest.raises(NotPlain, match="SimplePoint is not a named tuple"):
        put(replace(written, name="SimplePoint"), [])


def test_what_cannot_be_made_again_is_named() -> None:
    written = write([torch.nn.Linear(1, 1)], ())
    with pytest.raises(NotPlain, match="only the lost process had"):
        put(written, [])


@pytest.mark.parametrize("large", [[0] * (MAX_PLAIN + 1), [[0]] * (MAX_PARTS + 1)])
def test_too_much_is_refused(large: list[Any]) -> None:
    with pytest.raises(NotPlain, match="more than"):
        write(large, ())


def test_object_of_several_threads_is_left_alone() -> None:
    value = Meter()
    value.lock = threading.Lock()  # type: ignore[attr-defined]
    content = Content([value], ())
    value.update(1.0)
    content.put_back()
    assert value.total == 1.0, "another thread may be using it"


def test_what_somebody_else_keeps_is_left_alone() -> None:
    inner = Meter()
    content = Content([[inner]], {id(inner)})
    inner.update(1.0)
    content.put_back()
    assert inner.total == 1.0


def test_object_that_contains_itself_ends() -> None:
    value: list[Any] = [1]
    value.append(value)
    content = Content([value], ())
    value.append(2)
    content.put_back()
    assert len(value) == 2
    assert write(value, ()).items[0] == 1


@pytest.mark.parametrize("kind", ["expanded", "inference"])
def test_tensor_that_cannot_be_copied_to_is_no_obstacle(kind: str) -> None:
    with torch.inference_mode(kind == "inference"):
        value = torch.ones(1).expand(3) if kind == "expanded" else torch.ones(3)
    others = [1]
    content = Content([value, others], ())
    others.clear()
    content.put_back()
    assert (value.sum().item(), others) == (3, [1])


def test_large_object_does_not_keep_others_from_being_undone() -> None:
    batches, counts = [torch.ones(2) for _ in range(2 * MAX_PARTS)], {"n": 0}
    owner = SimplePoint(0)
    vars(owner).update(batches=list(batches), counts=counts)
    first, second = Content([batches, counts], ()), Content([owner], ())
    for content in (first, second):
        counts["n"] += 1
        content.put_back()
        assert counts == {"n": 0}


def test_attribute_that_is_too_large_does_not_keep_others_from_being_given() -> None:
    owner, there = SimplePoint(3), SimplePoint(0)
    vars(owner)["files"] = ["a"] * (MAX_PLAIN + 1)
    vars(there)["files"] = ["b"]
    put(pickle.loads(seen(owner)), there)
    assert (there.x, vars(there)["files"]) == (3, ["b"])


def test_tensor_on_a_device_stays_what_it_is_in_the_new_process() -> None:
    weights = torch.ones(3, device="meta")
    written = write([weights, 1], ())
    assert changed(written, write([weights, 1], ())) is SAME
    there = [torch.ones(3), 0]
    assert torch.equal(put(pickle.loads(pickle.dumps(written)), there)[0], torch.ones(3))


def test_one_object_that_became_two_becomes_two() -> None:
    value, there = Alias(), Alias()
    value.last, value.now = torch.ones(2), torch.ones(2) * 2
    put(pickle.loads(seen(value)), there)
    assert (there.last[0].item(), there.now[0].item()) == (1, 2)


def test_two_names_of_one_object_stay_so() -> None:
    shared, there = [1, 2], [0]
    done: dict[int, Any] = {}
    for _ in range(2):
        assert put(pickle.loads(seen(shared)), there, done) is there
    assert there == [1, 2]


def test_object_that_cannot_be_made_is_named() -> None:
    with pytest.raises(NotPlain, match="no object of the class NeedsValue"):
        put(write([NeedsValue(1)], ()), [])


def test_system_generator_has_no_state() -> None:
    assert not is_changeable(random.SystemRandom())


@pytest.mark.parametrize("bits", [np.random.Philox, np.random.SFC64, np.random.MT19937])
def test_generator_with_arrays_in_its_state_can_be_compared(bits: Any) -> None:
    one, other = np.random.Generator(bits(1)), np.random.Generator(bits(2))
    first = write(one, ())
    assert changed(first, write(one, ())) is SAME
    one.random()
    now = write(one, ())
    assert changed(first, now) is now
    put(pickle.loads(pickle.dumps(now)), other)
    assert other.random() == one.random()
