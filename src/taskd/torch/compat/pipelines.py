"""Pipelines (`torch.distributed.pipelining`) next to a replacement."""

from __future__ import annotations

import gc
import sys
from typing import Any

from taskd.runtime.private_names import Find, check_torch, find_owner, private_names

_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"

NAMES = (
    *private_names(_SCHEDULES, "_PipelineSchedule", "pipeline stages next to a replacement"),
    *private_names(
        f"{_SCHEDULES}:PipelineScheduleSingle",
        "_stage _stage_forward_initialized|_stage_initialized",
        "pipeline stages next to a replacement",
    ),
    *private_names(
        f"{_SCHEDULES}:PipelineScheduleMulti",
        "_stages _stages_forward_initialized|_stages_initialized",
        "pipeline stages next to a replacement",
    ),
    *private_names(_STAGE, "_prepare_forward_infra", "pipeline stages next to a replacement"),
    *private_names(
        f"{_SCHEDULES}:_PipelineSchedule",
        "_internal_losses",
        "pipelines after an abandoned step",
    ),
    *private_names(
        _STAGE,
        "fwd_cache|_forward_chunk_states bwd_cache output_chunks",
        "pipelines after an abandoned step",
    ),
)


CACHES = ("fwd_cache", "_forward_chunk_states", "bwd_cache", "output_chunks")
"""What a stage keeps of the microbatches of a step. From torch 2.15 on the second is the first."""


def check_pipelines(find: Find = find_owner) -> None:
    """Refuse a torch that could not run a pipeline with a replacement in it."""
    if _SCHEDULES in sys.modules:
        check_torch(NAMES, find)


def reset_pipelines(has_run: bool) -> None:
    """Let every pipeline schedule of this process exchange shapes again, as at its first step.

    A new rank does that in its first step, and its neighbours must answer; and what an abandoned
    step has left in a stage is dropped. `has_run`: a step is committed that has done it before.
    """
    schedules = sys.modules.get(_SCHEDULES)
    if schedules is None:
        return
    base = schedules._PipelineSchedule
    for schedule in [one for one in gc.get_objects() if issubclass(type(one), base)]:
        for name in vars(schedule):
            if name.startswith("_stage") and name.endswith("_initialized"):
                setattr(schedule, name, False)
        vars(schedule).get("_internal_losses", []).clear()
        for stage in vars(schedule).get("_stages", [vars(schedule).get("_stage")]):
            for cache in CACHES:
                vars(stage).get(cache, []).clear()
            if has_run and hasattr(stage.submod, "no_sync"):
                _infer_without_sync(stage)


def _infer_without_sync(stage: Any) -> None:
    """The next pass that only finds out shapes leaves no trace in DDP.

    It would make DDP reduce the gradients of the first microbatch by themselves, which gives the
    same sums with other last bits.
    """
    inherited = type(stage)._prepare_forward_infra

    def prepare(*args: Any, **kwargs: Any) -> Any:
        vars(stage).pop("_prepare_forward_infra", None)
        with stage.submod.no_sync():
            return inherited(stage, *args, **kwargs)

    stage._prepare_forward_infra = prepare
