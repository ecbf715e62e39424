"""A step is a number."""

from __future__ import annotations

import pickle

from taskd.torch.context import JobContext
from taskd.torch.step import Step
from taskd.torch.step_cycle import StepCycle
from taskd.worker.settings import WorkerSettings


def test_step_in_a_checkpoint_is_a_plain_number() -> None:
    step = Step(7, StepCycle(JobContext(WorkerSettings(), 0, 1), None))
    copy = pickle.loads(pickle.dumps(step))
    assert (type(copy), copy) == (int, 7)


def test_verified_calls_the_function_in_a_job_without_checks() -> None:
    step = Step(7, StepCycle(JobContext(WorkerSettings(), 0, 1), None))
    assert step.verified(lambda one, *, other: one + other, 2, other=3) == 5
