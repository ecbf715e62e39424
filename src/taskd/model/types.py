"""The two shapes that every machine shares: the event `Tick` and the result `Outcome`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from taskd.model.codes import RecoverCode

State_co = TypeVar("State_co", covariant=True)
Command_co = TypeVar("Command_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of the current state has passed."""


@dataclass(frozen=True)
class Outcome(Generic[State_co, Command_co]):
    """The result of one step of a machine: the next state, the commands to carry out, and why.

    Each machine has an alias `Outcome` that fixes its types of state and command.
    """

    state: State_co
    commands: tuple[Command_co, ...] = ()
    because: str = ""
    answer: RecoverCode = RecoverCode.OK
    """What the sender of the event is answered. Only clusterd's machine answers."""
