"""What a rank remembers of the script's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from taskd.errors import SettingsError
from taskd.torch.state.protected import OPTIONS, Protected


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_abandoned_step_brings_back_what_the_step_before_recorded() -> None:
    net, counter = nn.Linear(1, 1), Counter()
    protected = Protected(net, torch.optim.SGD(net.parameters()), None, {"counter": counter})
    for counter.count in (1, 2):
        protected.record_parts()
    counter.count = 3  # between two steps: no part of the committed one
    protected.record_before()
    assert protected.recorded_parts()["counter"] == {"count": 1}


class Sharpness(torch.optim.Optimizer):
    """Updates by another optimizer, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups


class Wrapper:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_optimizer_around_another_one_is_refused_without_it() -> None:
    net = nn.Linear(1, 1)
    base = torch.optim.SGD(net.parameters(), momentum=0.9)
    with pytest.raises(SettingsError, match=r"Sharpness updates by another optimizer, base, which"):
        Protected(net, Sharpness(base), None, {})
    with pytest.raises(
        SettingsError, match=r"not a torch\.optim\.Optimizer: give it Wrapper\.inner"
    ):
        Protected(net, Wrapper(base), None, {})  # type: ignore[arg-type]
    both = Protected(net, [Sharpness(base), base], None, {})
    assert len(both.optimizers) == 2


def test_optimizer_that_shares_the_state_of_the_inner_one_is_accepted() -> None:
    net = nn.Linear(1, 1)
    outer = Sharpness(torch.optim.SGD(net.parameters()))
    outer.state = outer.base.state
    assert Protected(net, outer, None, {}).optimizers == [outer]


def test_state_of_an_optimizer_for_all_its_parameters_is_a_part() -> None:
    net = nn.Linear(1, 1)
    last, new = (torch.optim.SGD(net.parameters()) for _ in range(2))
    last.state["calls"], new.state["old"] = 3, 1  # type: ignore[index]
    parts = Protected(net, last, None, {}).copy_parts()
    last.state["calls"] = 4  # type: ignore[index]
    Protected(net, new, None, {}).parts[OPTIONS].load_state_dict(parts[OPTIONS])
    assert dict(new.state) == {"calls": 3}


def test_options_of_optimizers_are_copied_again_only_when_they_have_changed() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    options = Protected(net, optimizer, None, {}).parts[OPTIONS]
    group = optimizer.param_groups[0]
    seen = [options.state_dict()]

    def has_changed() -> bool:
        seen.append(options.state_dict())
        return seen[-1] is not seen[-2]

    assert not has_changed()
    group["lr"].mul_(2)
    assert has_changed()
    assert seen[-2][0][0]["lr"] == torch.tensor(0.1), "the copy before is still what it was"
    group["betas"] = (0.5, 0.999)
    assert has_changed()
    group["of the script"] = [1]
    assert has_changed()
    group["of the script"].append(2)
    assert has_changed()
    del group["of the script"]
    assert has_changed()
    state: dict[Any, Any] = optimizer.state
    state["of the script"] = 1
    assert has_changed()
    options.load_state_dict(seen[0])
    assert has_changed()
    assert seen[-1] == seen[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert has_changed()
    assert not has_changed()
