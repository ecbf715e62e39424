"""Values to JSON and back by their type hints; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pytest

from taskd.model.ids import Rank
from taskd.wire.json_codec import TypeMismatch, from_plain, to_plain


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    at: float
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    ranks: frozenset[Rank]
    by_rank: Mapping[Rank, Inner]
    pair: tuple[int, str]
    many: tuple[Inner, ...]
    colour: Colour = Colour.RED


SAMPLE = Outer(frozenset({Rank(2), Rank(1)}), {Rank(3): Inner(1.5)}, (1, "a"), (Inner(2.0, "x"),))


def test_value_survives_json() -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(SAMPLE)))) == SAMPLE


def test_int_is_accepted_for_a_float() -> None:
    assert from_plain(Inner, {"at": 2}) == Inner(2.0)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"ranks": 3}, "Outer.ranks: expected a list"),
        ({"ranks": ["1"]}, r"Outer.ranks\[0\]: expected int, got str"),
        ({"by_rank": {"x": {"at": 1.0}}}, "key 'x' is not a number"),
        ({"by_rank": {"3": {}}}, r"Outer.by_rank\[3\]: at is missing"),
        ({"pair": [1]}, "expected 2 items, got 1"),
        ({"colour": "blue"}, "'blue' is not a Colour"),
        ({"many": [{"at": True}]}, "expected float, got bool"),
    ],
)
def test_mismatch_is_refused_with_its_path(change: dict[str, object], because: str) -> None:
    with pytest.raises(TypeMismatch, match=because):
        from_plain(Outer, {**to_plain(SAMPLE), **change})
