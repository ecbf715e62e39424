"""Installs a hook at the end of a MindSpore job's steps when it is imported.

    a call of an optimizer          scripts in PyNative mode
    a call of `TrainOneStepCell`    a step that is compiled as a whole
    the end of a `Model`'s step     user-defined networks under `Model.train`; with data sinking,
                                    all steps of one sink

Only the first of them that occurs counts the steps. A step inside a function of `mindspore.jit`
triggers none of them and is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspore import nn
from mindspore.experimental import optim
from mindspore.train.callback._callback import CallbackManager

from taskd.mindspore.model_step_recorder import MindSporeHooks
from taskd.worker.profiling.framework_hooks import patch
from taskd.worker.profiling.profiler import StepEndHook

_hook = StepEndHook(MindSporeHooks())


def _with_hook(step_function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step_function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step_function(self, *args, **kwargs)
        _hook.step_ended(id(self))
        return result

    return step


def _in_child() -> None:
    global _hook
    _hook.hooks.remove()
    _hook = StepEndHook(MindSporeHooks())


for _owner in (nn.Optimizer, optim.Optimizer, nn.TrainOneStepCell):
    patch(_owner, "__call__", _with_hook)
patch(CallbackManager, "on_train_step_end", _with_hook)
os.register_at_fork(after_in_child=_in_child)
