"""What a rank remembers of the script's own objects."""

from __future__ import annotations

import torch
from torch import nn

from taskd.torch.state.protected import Protected


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
