"""The state of DDP's communication hooks, such as the error feedback of PowerSGD.

A hook that compresses gradients remembers what it has left out, and adds it in the next step. This
differs from rank to rank and belongs to the training state, so it is protected without being asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from taskd.torch import compat


def parts_of(models: Iterable[nn.Module], given: Iterable[object]) -> dict[str, Any]:
    """A part for each hook with a state, unless the script has given this state itself."""
    known = list(given)
    return {
        f"state of {getattr(hook, '__name__', 'hook')} in model {index}": HookState(state)
        for index, model in enumerate(models)
        if isinstance(model, DistributedDataParallel)
        for hook, state in compat.hooks_of(model)
        if not (state is None or isinstance(state, ProcessGroup))
        and not any(one is state for one in known)
    }


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A backward pass in here leaves no trace in the state of the model's hooks."""
    before = {part: deepcopy(part.state_dict()) for part in parts_of([model], ()).values()}
    try:
        yield
    finally:
        for part, state in before.items():
            part.load_state_dict(state)


class HookState:
    """All attributes of a hook's state, except for process groups."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {
            name: _plain(getattr(self._state, name))
            for name in self._names()
            if not isinstance(getattr(self._state, name), ProcessGroup)
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            present: Any = getattr(self._state, name, None)
            if hasattr(present, "set_state"):
                present.set_state(value)
            else:
                setattr(self._state, name, value)

    def _names(self) -> list[str]:
        slots = (getattr(kind, "__slots__", ()) for kind in type(self._state).__mro__)
        names = {name for one in slots for name in ([one] if isinstance(one, str) else one)}
        names |= vars(self._state).keys() if hasattr(self._state, "__dict__") else set()
        return sorted(name for name in names if hasattr(self._state, name))


def _plain(value: Any) -> Any:
    """A generator of NumPy is its numbers."""
    return value.get_state() if hasattr(value, "get_state") else value
