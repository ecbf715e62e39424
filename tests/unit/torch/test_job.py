"""What a script may ask of its job more than once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from taskd.errors import SettingsError
from taskd.torch.context import JobContext
from taskd.torch.job import Job
from taskd.worker.settings import WorkerSettings


def _job() -> Job:
    job, net = Job(JobContext(WorkerSettings(), 0, 1)), nn.Linear(2, 1)
    job.protect(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    return job


def _train(job: Job, total: int) -> list[int]:
    done = []
    for step in job.steps(total):
        for attempt in step:
            with attempt:
                done.append(int(step))
    return done


def test_second_loop_over_steps_that_are_done_is_refused() -> None:
    job = _job()
    assert _train(job, 3) == [0, 1, 2]
    with pytest.raises(SettingsError, match=r"a loop over 3 steps.*steps\(6\)"):
        next(job.steps(3))


def test_second_loop_trains_on_with_a_larger_sum() -> None:
    job = _job()
    assert _train(job, 3) + _train(job, 5) == [0, 1, 2, 3, 4]


def test_loop_that_was_left_can_be_entered_again() -> None:
    job = _job()
    for step in job.steps(3):
        for attempt in step:
            with attempt:
                pass
        break
    assert _train(job, 3) == [1, 2]


def test_second_call_of_protect_is_refused() -> None:
    job, net = _job(), nn.Linear(2, 1)
    with pytest.raises(SettingsError, match="called twice"):
        job.protect(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
