"""An abandoned step leaves no trace: BatchNorm, dropout, accumulation, autocast, scaler, scheduler.

The script draws from every generator, changes buffers in three forward passes, accumulates
gradients and advances a data position before the step is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run

STEPS = 8


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.everything, steps=STEPS))


@pytest.mark.parametrize("moment", ["in forward", "in backward", "after backward"])
@pytest.mark.parametrize("kind", ["kills", "cuts"])
def test_fault_in_the_middle_of_a_step_leaves_no_trace(
    kind: str, moment: str, calm: list[Any], tmp_path: Path
) -> None:
    faults: dict[str, Any] = {kind: [(2, 0, 3, moment), (0, 0, 5, moment)]}
    assert_same(calm, run(tmp_path / "run", scripts.everything, steps=STEPS, **faults))


@pytest.mark.parametrize("moment", ["in the optimizer", "after the optimizer"])
def test_rank_lost_at_the_update_leaves_no_trace(
    moment: str, calm: list[Any], tmp_path: Path
) -> None:
    kills = [(0, 0, 2, moment), (1, 0, 5, moment)]
    assert_same(calm, run(tmp_path / "run", scripts.everything, steps=STEPS, kills=kills))
