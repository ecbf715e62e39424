"""The state of a communication hook can be copied and brought back."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from taskd.torch.groups.ddp_hook_state import HookState, parts_of
from taskd.torch.state import fingerprints
from taskd.torch.state.protected import Protected


def test_error_feedback_is_brought_back() -> None:
    state = PowerSGDState(process_group=None)
    state.error_dict[0] = torch.ones(3)
    part = HookState(state)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    protected = Protected(model, optimizer, None, {"hook": part})
    saved = protected.copy_parts()["hook"]
    before = fingerprints.of_value(part.state_dict())
    drawn = state.rng.randint(1 << 30)
    state.error_dict[0].add_(1)
    state.iter += 5
    assert fingerprints.of_value(part.state_dict()) != before
    part.load_state_dict(saved)
    assert fingerprints.of_value(part.state_dict()) == before
    assert torch.equal(state.error_dict[0], torch.ones(3))
    assert state.iter == 0
    assert state.rng.randint(1 << 30) == drawn
    assert isinstance(state.rng, np.random.RandomState)


def test_models_without_a_hook_have_no_such_part() -> None:
    assert parts_of([torch.nn.Linear(2, 2)], []) == {}
