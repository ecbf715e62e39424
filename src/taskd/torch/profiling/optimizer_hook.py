"""Puts one hook behind all optimizers of torch when it is imported: a step has ended.

`taskd run` imports it before the script runs, so the script need not change. What happens then is
in `worker/profiling/profiler.py`.
"""

from __future__ import annotations

import os
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from taskd.torch.profiling.step_recorder import TorchHooks
from taskd.worker.profiling.profiler import StepEndHook

_hook = StepEndHook(TorchHooks())


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _hook.step_ended(id(optimizer))


def _in_child() -> None:
    global _hook
    _hook.hooks.remove()
    _hook = StepEndHook(TorchHooks())


register_optimizer_step_post_hook(_after_step)
os.register_at_fork(after_in_child=_in_child)
