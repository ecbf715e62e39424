"""At the end of every optimizer's step: does anybody want to look inside?

Importing `taskd.torch` puts one hook behind all optimizers. It compares two numbers, and that is
all an unwatched job pays. `taskd run` imports it before the script is run, so this needs nothing
of the script.
"""

from __future__ import annotations

import os
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from taskd.torch.hooks import TorchHooks
from taskd.worker import profiling
from taskd.worker.profiling import Profiling


class Glance:
    """One a process. Forked children begin anew: nobody reads what they would record."""

    def __init__(self) -> None:
        self.hooks = TorchHooks()
        self.number = 0
        self._profiling: Profiling | None = None
        self._pacemaker = 0
        """The optimizer that steps first; others step in between."""

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ours = self._profiling
        if ours is None:
            ours = self._profiling = profiling.of_process()
            self._pacemaker = id(optimizer)
        if id(optimizer) != self._pacemaker:
            return
        self.number += 1
        if self.hooks.installed:
            self.hooks.stepped(self.number)
        if ours.page.word[0] != ours.applied:
            ours.follow(self.hooks)


_glance = Glance()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _glance.after_step(optimizer, args, kwargs)


def _in_child() -> None:
    global _glance
    _glance.hooks.remove()
    _glance = Glance()


register_optimizer_step_post_hook(_after_step)
os.register_at_fork(after_in_child=_in_child)
