"""Warns about a script that does something in or between steps that a repair cannot undo.

Each warning is given once. `step_cycle.py` says when to look.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from taskd.torch import compat
from taskd.torch.context import JobContext
from taskd.torch.loop import carried_names, loop_variables
from taskd.torch.state.undo import few_of

log = logging.getLogger(__name__)

WATCHED_WEIGHTS = 100
WATCHED_STEPS = 4
"""In so many steps of a process, other modules are looked at."""
WATCHED_STATES = 64
_PLAIN = (torch.Tensor, nn.Parameter)


class ScriptWarnings:
    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._has_warned_about_code = self._has_warned_about_weights = False
        self._has_warned_about_variables = self._has_warned_about_buffers = False
        self._weights: Sequence[nn.Parameter] = ()
        """Some of the weights, to notice changes outside of steps."""
        self._modules: dict[str, object] = {}
        """Modules that are not protected: a form that shows whether they have changed."""
        self._steps = 0
        self._named = set[str]()
        self._param_groups = -1
        """How many groups of parameters the optimizers had in the first step."""
        self._last_weights = (-1, 0)
        """The incident and the version of these weights after the last step."""
        self._last_buffers: list[tuple[int, int]] = []
        """The ids and versions of the buffers after the last step."""

    def watch(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights[:: len(weights) // WATCHED_WEIGHTS + 1]

    def begin_step(self) -> None:
        """Look at what has changed since the last step."""
        self._check_buffers()
        self._check_weights()
        self._check_param_groups()
        self._forgotten()
        if self._steps < WATCHED_STEPS:
            self._check_modules()
        self._steps += 1

    def end_step(self) -> None:
        self._last_weights = self._version_of_weights()
        self._last_buffers = self._versions_of_buffers()

    def code_after(self, number: int) -> None:
        """The script runs on after a step that was abandoned, as if it were committed."""
        if not self._has_warned_about_code:
            self._has_warned_about_code = True
            log.warning(
                "step %d was abandoned and is yielded again: code after `with step:` also runs for "
                "the abandoned attempt. To run it once per committed step, write "
                "`for attempt in step:` and `with attempt:` instead",
                number,
            )

    def outer_variables(self, function: Callable[..., Any]) -> None:
        """A step that is a function should not leave anything outside of it for the next one."""
        code = getattr(function, "__code__", None)
        if code is None or self._has_warned_about_variables or self._context.manager is None:
            return
        self._has_warned_about_variables = True
        if self._context.variables.objects.covers(function):
            return
        if names := carried_names.of_function(code):
            log.warning(
                "%s sets variables of the code around it, which the next step reads: %s. A "
                "repeated step and a replacement would find other values: put them into an object "
                "with state_dict and load_state_dict, and give it to protect()",
                getattr(function, "__name__", "the step"),
                ", ".join(names),
            )

    def attributes(self, frame: FrameType) -> None:
        """Variables of the loop are kept, attributes of the script's objects are not."""
        if self._has_warned_about_variables or not self._context.is_protected:
            return
        self._has_warned_about_variables = True
        protected = self._context.protected
        if names := loop_variables.unprotected_attributes(frame, protected.objects()):
            log.warning(
                "the next step reads what this one sets in %s, and that is not protected: a "
                "repeated step and a replacement would find other values. Give an object with "
                "state_dict and load_state_dict to protect()",
                ", ".join(names),
            )

    def _forgotten(self) -> None:
        """A script may also make another optimizer in the middle of its training."""
        names = [
            one for one in self._context.variables.objects.forgotten() if one not in self._named
        ]
        if names:
            self._named.update(names)
            log.warning(
                "%s: used by the steps, and not protected. An abandoned step would not be undone "
                "in it, and a replacement would begin with its first state: give it to protect(), "
                "unless it is a part of an object that was",
                ", ".join(names),
            )

    def _version_of_weights(self) -> tuple[int, int]:
        """It changes when weights are changed in place, or by a repair."""
        return self._context.incident, sum(compat.versions(self._weights))

    def _check_weights(self) -> None:
        incident, version = self._version_of_weights()
        if self._has_warned_about_weights or self._last_weights[0] != incident:
            return
        if self._last_weights[1] != version:
            self._has_warned_about_weights = True
            log.warning(
                "weights were changed between steps %d and %d. A repair would give a new process "
                "the weights of another rank, and cannot undo this change: make it in an attempt",
                self._context.step - 1,
                self._context.step,
            )

    def _versions_of_buffers(self) -> list[tuple[int, int]]:
        """They change when buffers are changed in place, or replaced."""
        buffers = self._context.protected.buffers()
        return list(zip(map(id, buffers), compat.versions(buffers), strict=True))

    def _check_buffers(self) -> None:
        before, protected = self._last_buffers, self._context.protected
        if self._has_warned_about_buffers or self._last_weights[0] != self._context.incident:
            return
        now = self._versions_of_buffers()
        if len(now) == len(before) and now != before:
            self._has_warned_about_buffers = True
            places = (place for place, one in enumerate(now) if one != before[place])
            log.warning(
                "buffers were changed between steps %d and %d, first of all %s. After a fault, "
                "ranks may have other values of them than without it: before a forward pass "
                "between steps call model.eval() and after it model.train(), or make the change "
                "in an attempt",
                self._context.step - 1,
                self._context.step,
                protected.buffer_name(next(places)),
            )

    def _check_modules(self) -> None:
        """A copy of the model as a moving average, a target network, a metric."""
        before, other = self._modules, self._context.variables.objects.other_modules()
        self._modules = {name: _form(module) for name, module in other.items()}
        changed = sorted(
            name for name, one in self._modules.items() if before.get(name, one) != one
        )
        if changed:
            self._steps = WATCHED_STEPS
            log.warning(
                "%s: changed by the steps, and not protected. An abandoned step is not undone in "
                "it, and a replacement would begin with its first state: add it to the list "
                "protect(model=[…]). What is neither a weight nor a buffer of it has to be in an "
                "object with state_dict and load_state_dict that is given to protect()",
                ", ".join(changed),
            )

    def _check_param_groups(self) -> None:
        count = sum(len(one.param_groups) for one in self._context.protected.optimizers)
        if self._param_groups not in (count, -1):
            log.warning(
                "an optimizer has got other groups of parameters in step %d: a replacement does "
                "not have them, so a lost rank cannot be repaired. Create all groups before "
                "protect(), with a learning rate of 0 until they are needed",
                self._context.step,
            )
        self._param_groups = count


def _form(module: nn.Module) -> object:
    """It changes when a weight, a buffer or another attribute of the module does."""
    tensors = [*module.parameters(), *module.buffers()]
    others = [
        value
        for one in module.modules()
        for name, value in vars(one).items()
        if name != "training" and not name.startswith("_")
    ]
    tensors += [value for value in others if isinstance(value, torch.Tensor)]
    sizes = [len(value) for value in others if isinstance(value, list)]
    numbers = [value for value in others if type(value) in (int, float)]
    versions = [(id(one), compat.version(one)) for one in tensors]
    # Changes by way of `.data` are not counted in versions.
    plain = [one for one in tensors if type(one) in _PLAIN and one.layout == torch.strided]
    samples = [few_of(one.detach()).tolist() for one in plain[:: len(plain) // WATCHED_STATES + 1]]
    return repr((versions, samples, sizes, numbers))
