"""`protect` refuses DeepSpeed with the reason, whichever of its objects it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from taskd.errors import SettingsError
from taskd.torch.state.protected import Protected


class DeepSpeedEngine(nn.Linear):
    """Stands for an object of the package, which is not installed here."""

    __module__ = "deepspeed.runtime.engine"


class DeepSpeedZeroOptimizer:
    """Like DeepSpeed's: not an optimizer of torch."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"


def test_engine_is_refused() -> None:
    engine = DeepSpeedEngine(2, 2)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="DeepSpeed cannot be protected"):
        Protected(engine, optimizer, None, {})


def test_its_optimizer_is_refused() -> None:
    with pytest.raises(SettingsError, match="DeepSpeed cannot be protected"):
        Protected(nn.Linear(2, 2), DeepSpeedZeroOptimizer(), None, {})  # type: ignore[arg-type]
