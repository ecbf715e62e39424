"""A script that forgets a module is warned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from taskd.torch.context import JobContext
from taskd.torch.loop.script_warnings import ScriptWarnings
from taskd.torch.state.protected import Protected
from taskd.worker.settings import WorkerSettings


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0


def steps(context: JobContext) -> Iterator[int]:
    warnings = ScriptWarnings(context)
    for number in range(5):
        context.variables.bind()
        warnings.begin_step()
        yield number
        warnings.end_step()


def test_module_that_changes_and_is_not_protected_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = JobContext(WorkerSettings(), 0, 1)
    net, teacher, metric, loss = nn.Linear(2, 2), nn.Linear(2, 2), Mean(), nn.MSELoss()
    average, inner = copy.deepcopy(net), nn.Sequential(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    context.protected = Protected(net, optimizer, None, {})
    context.variables.objects.leave_to_others(*context.protected.objects())
    with caplog.at_level(logging.WARNING):
        for _ in steps(context):
            optimizer.zero_grad()
            loss(inner(torch.ones(1, 2)), teacher(torch.ones(1, 2))).backward()
            optimizer.step()
            for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            metric.total += 1.0
    assert caplog.text.count("average, metric: changed by the steps, and not protected") == 1


def test_optimizer_that_is_made_in_the_middle_of_the_training_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context, net = JobContext(WorkerSettings(), 0, 1), nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    context.protected = Protected(net, optimizer, None, {})
    context.variables.objects.leave_to_others(*context.protected.objects())
    named = []
    for number in steps(context):
        named.append(caplog.text.count("optimizer: used by the steps, and not protected"))
        optimizer.step()
        if number == 1:
            optimizer = torch.optim.Adam(net.parameters())
    assert named == [0, 0, 1, 1, 1]
