"""torch/state/transfer.py: a state that was received is that of its sender."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taskd.torch.state import transfer
from taskd.torch.state.protected import Protected
from taskd.torch.state.transfer import StateImage


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskd.torch.state.sealed._key", lambda: b"key of the test")


class Counting(torch.optim.SGD):
    """With a number before the tensors of its state, as Adafactor of transformers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = torch.ones(2)
                state["scale"] = 0.5


def test_state_of_an_optimizer_keeps_its_order() -> None:
    def protected() -> Protected:
        net = torch.nn.Linear(2, 2)
        return Protected(net, Counting(net.parameters()), None, {})

    here, there = protected(), protected()
    here.optimizers[0].step()
    image, sent = StateImage(here, 1, 0, ""), bytearray()
    image.send(sent.extend)

    def receive(target: memoryview) -> None:
        target[:] = sent[: target.nbytes]
        del sent[: target.nbytes]

    transfer.receive_state(there, 1, 0, "", receive, keep_own=False)
    expected, found = (one.optimizers[0].state_dict()["state"][0] for one in (here, there))
    assert list(found) == list(expected) == ["step", "mean", "scale"]
    assert found["step"] == 1
    assert torch.equal(found["mean"], expected["mean"])
