"""Variables of an attempt are kept for the replacement that runs the code after it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from taskd.torch.loop.attempt_values import (
    OBJECTS,
    SIZE,
    AttemptValues,
    calling_frame,
    put_into,
    set_since,
)


class Watch:
    def __enter__(self) -> Watch:
        self.begin = calling_frame().f_lasti
        return self

    def __exit__(self, *_: object) -> None:
        self.seen = set_since(self.begin, calling_frame())


def test_variables_that_are_read_later_are_found() -> None:
    watch = Watch()
    with watch:
        data = [1.0, 2.0]
        loss = sum(data)
        count = 3
    assert watch.seen == {"loss": 3.0, "count": 3}
    assert loss == count


class Given:
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Watch]:
        put_into(calling_frame(), self._values)
        yield from ()


def test_variables_of_a_function_can_be_set_from_outside() -> None:
    for watch in Given({"loss": 0.5}):
        with watch:
            loss = 1.0
    assert loss == 0.5


def test_values_survive_the_process(tmp_path: Path) -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    kept = {"loss": loss, "log": {"name": "a", "parts": [1, 2.5]}, "large": torch.zeros(5000)}
    AttemptValues(tmp_path, 0).save(3, kept)

    after = AttemptValues(tmp_path, 0)
    assert after.can_restore
    assert after.restore(3) == {"loss": torch.tensor(0.5), "log": kept["log"]}
    lost = after.restore(4)
    assert torch.isnan(lost["loss"])
    assert lost["log"]["name"] == "a"
    assert math.isnan(lost["log"]["parts"][1])


def test_what_a_lost_attempt_has_changed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"loss": 1.0, "average": 2.0, OBJECTS: {"generator": 1, "losses": 2}}
    AttemptValues(tmp_path, 0).save(3, kept)
    with caplog.at_level(logging.WARNING):
        assert AttemptValues(tmp_path, 0).restore(4, ["average"]).keys() == {"loss"}
    assert "average, generator, losses. If the training depends on them" in caplog.text


def test_first_start_forgets_the_last_run(tmp_path: Path) -> None:
    AttemptValues(tmp_path, 0).save(3, {"loss": 1.0})
    AttemptValues(tmp_path, 0).forget_predecessor()
    assert not AttemptValues(tmp_path, 0).can_restore


class Output(NamedTuple):
    loss: float
    size: int


class Mode(StrEnum):
    TRAIN = "train"


def test_values_keep_their_types_and_keys(tmp_path: Path) -> None:
    output, counts = Output(0.5, 2), defaultdict(int, {1: 2})
    kept = {"output": output, "counts": counts, "mode": Mode.TRAIN, "keys": {(1, 2): 3}}
    AttemptValues(tmp_path, 0).save(3, kept)
    after = AttemptValues(tmp_path, 0).restore(3)
    assert after == kept
    assert after["output"].loss == 0.5
    assert after["counts"]["new"] == 0
    assert after["mode"] is Mode.TRAIN


def test_enumeration_of_a_function_is_left_out(tmp_path: Path) -> None:
    class Local(StrEnum):
        ONE = "one"

    values = AttemptValues(tmp_path, 0)
    values.save(3, {"one": Local.ONE, "loss": 0.5})
    assert values.restore(3) == {"loss": 0.5}


def test_what_there_is_no_room_for_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"count": 2, OBJECTS: {"texts": "x" * 2 * SIZE, "best": 1}}
    values = AttemptValues(tmp_path, 0)
    with caplog.at_level(logging.WARNING):
        values.save(3, kept)
        values.save(4, kept)
    assert AttemptValues(tmp_path, 0).restore(4) == {"count": 2, OBJECTS: {"best": 1}}
    assert caplog.text.count("texts is too large to be kept") == 1
