"""Puts one hook where a MindSpore job's steps end, when it is loaded.

    a call of an optimizer          scripts in PyNative mode
    a call of `TrainOneStepCell`    a step compiled as a whole
    the end of a `Model`'s step     networks of the user's own under `Model.train`; with data
                                    sinking, all the steps of one sink

The first of them that is seen sets the pace. A step inside a function of `mindspore.jit` is none of
them and is not seen.
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
from taskd.worker.profiling.spans import replace
from taskd.worker.profiling.step_end import Glance

_glance = Glance(MindSporeHooks())


def _behind(stepper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stepper)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stepper(self, *args, **kwargs)
        _glance.after_step(id(self))
        return result

    return step


def _in_child() -> None:
    global _glance
    _glance.hooks.remove()
    _glance = Glance(MindSporeHooks())


for _owner in (nn.Optimizer, optim.Optimizer, nn.TrainOneStepCell):
    replace(_owner, "__call__", _behind)
replace(CallbackManager, "on_train_step_end", _behind)
os.register_at_fork(after_in_child=_in_child)
