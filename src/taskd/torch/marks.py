"""Marks incidents in the tools where people look at a training: TensorBoard, W&B, MLflow.

    marks = IncidentMarks(job, tensorboard=writer)      # or wandb=run, mlflow=mlflow
    for step in job.steps(10_000):
        …
        marks(step)

A mark is written by rank 0 at the first step that is complete after a recovery. None of the tools
is imported here: the script passes what it uses already.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

log = logging.getLogger(__name__)

NAME = "taskd/incident"


class HasIncident(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def incident(self) -> int: ...


class IncidentMarks:
    """Call it after each step, with the number of the step.

    Args:
        job: What `taskd.torch.init()` has returned.
        tensorboard: A `SummaryWriter`.
        wandb: A run of Weights & Biases, as `wandb.init()` returns it.
        mlflow: The module `mlflow`, or a client with `log_metric`.
    """

    def __init__(
        self, job: HasIncident, *, tensorboard: Any = None, wandb: Any = None, mlflow: Any = None
    ) -> None:
        self._job = job
        self._seen = 0
        """A new process of rank 0, alone or with all others, marks the incident that made it."""
        self._tensorboard, self._wandb, self._mlflow = tensorboard, wandb, mlflow

    def __call__(self, step: int) -> None:
        number = self._job.incident
        if number == self._seen:
            return
        self._seen = number
        if self._job.rank == 0:
            self._write(int(step), number)

    def _write(self, step: int, number: int) -> None:
        try:
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(NAME, number, step)
                text = f"recovered from incident {number} before step {step}"
                self._tensorboard.add_text(NAME, text, step)
            if self._wandb is not None:
                self._wandb.log({NAME: number}, step=step)
            if self._mlflow is not None:
                self._mlflow.log_metric(NAME, number, step=step)
        except Exception as error:  # noqa: BLE001 - a mark must never end the training
            log.warning("incident %d is not marked: %s", number, error)
