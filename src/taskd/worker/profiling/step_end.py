"""At the end of every training step: does anybody want to look inside?

Two numbers are compared, and that is all that an unwatched job pays. Each framework has a hook that
knows when a step has ended (`torch/profiling/optimizer_hook.py`, `mindspore/callback_hook.py`).
"""

from __future__ import annotations

from typing import Protocol

from taskd.worker.profiling import switch as profiling
from taskd.worker.profiling.switch import Hooks, Profiling


class StepHooks(Hooks, Protocol):
    @property
    def installed(self) -> bool: ...

    def stepped(self, number: int) -> None:
        """A step has ended. Called only while they are installed."""


class Glance:
    """One a process. Forked children begin anew: nobody reads what they would record."""

    def __init__(self, hooks: StepHooks) -> None:
        profiling.steps_are_seen = True
        self.hooks = hooks
        self.number = 0
        self._profiling: Profiling | None = None
        self._pacemaker = 0

    def after_step(self, of: int) -> None:
        """`of` is the identity of what has stepped: whoever steps first sets the pace."""
        ours = self._profiling
        if ours is None:
            ours = self._profiling = profiling.of_process()
            self._pacemaker = of
        if of != self._pacemaker:
            return
        self.number += 1
        if self.hooks.installed:
            self.hooks.stepped(self.number)
        if ours.page.word[0] != ours.applied:
            ours.follow(self.hooks)
