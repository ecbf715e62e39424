"""A batch is as it was, whatever an attempt has done to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from taskd.torch.data.given_batch import GivenBatch


def fresh() -> dict[str, Any]:
    return {"x": torch.arange(4.0), "labels": [torch.ones(2), "name"], "n": np.zeros(2)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one.keys() == other.keys()
        and torch.equal(one["x"], other["x"])
        and torch.equal(one["labels"][0], other["labels"][0])
        and one["labels"][1:] == other["labels"][1:]
        and bool((one["n"] == other["n"]).all())
    )


def spoil(batch: dict[str, Any]) -> None:
    batch["x"].requires_grad_()
    batch["x"].sum().backward()
    batch["n"] += 1
    batch.pop("labels").clear()
    with torch.no_grad():
        batch["x"].add_(1)
    batch["more"] = 1


def test_changed_batch_is_restored_for_the_next_attempt() -> None:
    given = GivenBatch(fresh(), fresh)
    batch = given.give()
    for _ in range(3):
        given.begin_attempt()
        assert same(batch, fresh())
        assert batch["x"].grad is None
        spoil(batch)
    assert given.give() is batch
    assert same(batch, fresh())


def test_what_the_script_prepares_before_its_attempts_stays() -> None:
    given = GivenBatch(fresh(), fresh)
    batch = given.give()
    batch["x"].mul_(2)
    batch["double"] = batch["labels"][0].double()
    for _ in range(3):
        given.begin_attempt()
        assert torch.equal(batch["x"], torch.arange(4.0) * 2)
        assert torch.equal(batch["double"], torch.ones(2, dtype=torch.float64))
        batch["x"].add_(1)
        batch["double"].add_(1)
        batch["labels"][0].add_(1)
    assert same(given.give(), fresh())
