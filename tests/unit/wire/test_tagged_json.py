from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import pytest

from taskd.wire.tagged_json import UnreadableRecord, read, write


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Left:
    at: float = inf


@dataclass(frozen=True, slots=True)
class Right:
    at: float = inf
    inside: tuple[Left | Right, ...] = ()
    ranks: frozenset[int] = frozenset()
    by_rank: Mapping[int, tuple[str, ...]] | None = None
    colour: Colour = Colour.RED


TYPES: dict[str, type] = {kind.__name__: kind for kind in (Colour, Left, Right)}


def test_values_are_read_back_with_their_types() -> None:
    value = Right(1.5, (Left(), Right(2.0)), frozenset({3, 1}), {7: ("a", "b")})
    assert read(write(value), TYPES) == value
    back = read(write(value), TYPES)
    assert isinstance(back.inside[0], Left)
    assert isinstance(back.colour, Colour)


def test_new_field_gets_its_default_and_removed_field_is_ignored() -> None:
    assert read('{"~":"Left","gone":1}', TYPES) == Left()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "invalid JSON"),
        ('{"~":"Up"}', "Up"),
        ('{"x":1}', "no type tag"),
        ('{"~enum":["Colour","blue"]}', "blue"),
        ('{"~enum":["Paint","blue"]}', "Paint"),
    ],
)
def test_unreadable_text_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(UnreadableRecord, match=says):
        read(text, TYPES)


def test_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        write(object())
