"""`protect(retry_on=…)`: a listed exception causes a replay of the step and ends no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taskd.model.faults import FaultCause
from taskd.model.messages import WorkerFailed
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import Hiccup

STEPS = 6


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.ddp, steps=STEPS))


@pytest.mark.parametrize("moment", ["in forward", "after backward"])
def test_listed_exception_replays_the_step(moment: str, calm: list[Any], tmp_path: Path) -> None:
    """Also a subclass of a listed exception, on two ranks, at any place in the step."""
    world = run(
        tmp_path / "run",
        scripts.ddp,
        steps=STEPS,
        raises=[(1, 0, 2, moment), (3, 0, 4, moment)],
        protect={"retry_on": (OSError, Hiccup)},
    )
    reports = [body for body in world.received if isinstance(body, WorkerFailed)]
    raised = {(one.rank, one.evidence) for one in reports if one.kind is FaultCause.EXCEPTION}
    assert raised == {(1, "SmallHiccup: in step 2"), (3, "SmallHiccup: in step 4")}
    assert sum(world.incarnations.values()) == 0
    assert_same(calm, world)


def test_other_exception_ends_the_process(calm: list[Any], tmp_path: Path) -> None:
    world = run(
        tmp_path / "run",
        scripts.ddp,
        steps=STEPS,
        raises=[(1, 0, 2, "in forward")],
        protect={"retry_on": (OSError,)},
    )
    assert world.incarnations[1] == 1
    assert_same(calm, world)
