"""What can be recorded of a training job, and how a rank tells its pace while it is recorded.

The five parts are switched by name (`Switch`, the JSON of Ascend's ConfigMap); inside a node the
switch is one word of bits. `worker/` records, `core/manager/stragglers.py` judges the paces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag

from taskd.model.ids import Incarnation, Rank


class Part(IntFlag):
    """What is recorded. The bits travel through shared memory and stay as they are."""

    COMMUNICATION = 1
    STEP = 2
    FORWARD = 4
    DATA = 8
    SAVE = 16


NOTHING = Part(0)
EVERYTHING = Part(31)
DEFAULT_DOMAIN = EVERYTHING & ~Part.COMMUNICATION

KEYS: Mapping[str, Part] = {
    "CommunicationOperator": Part.COMMUNICATION,
    "Step": Part.STEP,
    "SaveCheckpoint": Part.SAVE,
    "FP": Part.FORWARD,
    "DataLoader": Part.DATA,
}
"""Ascend's names, in the order of its switch."""

OFF, ON, FAILED = 0, 1, 2
"""How a domain fares, as in the code 14DC."""


def parts_of(switch: Mapping[str, object]) -> Part:
    """What a switch asks for. Only a plain "on" counts; an empty switch asks for nothing."""
    return parts_named(key for key in KEYS if switch.get(key) == "on")


def parts_named(names: Iterable[str]) -> Part:
    wanted = NOTHING
    for name in names:
        wanted |= KEYS.get(name, NOTHING)
    return wanted


def parts_ordered(default_domain: bool, communication: bool, names: Iterable[str]) -> Part:
    """What an order on the bus asks for: two domains, or, from a manager of ours, names."""
    if exact := parts_named(names):
        return exact
    wanted = DEFAULT_DOMAIN if default_domain else NOTHING
    return wanted | Part.COMMUNICATION if communication else wanted


def names_of(parts: Part) -> tuple[str, ...]:
    return tuple(name for name, part in KEYS.items() if part & parts)


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """One connection of a rank to a peer, since it was opened, as the kernel accounts for it."""

    here: str
    """address:port of our end"""
    there: str
    sent_bytes: int
    busy_s: float
    """How long bytes of ours were on their way, the peer being ready to take them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a rank spends its time, summed up since recording began. Compare two of them."""

    rank: Rank
    incarnation: Incarnation
    recorded: Part
    """What is recorded at present."""
    problem: str = ""
    """Why what was asked for is not recorded, or not kept; empty when all is well."""
    steps: int = 0
    total_s: float = 0.0
    """Of all these steps."""
    wait_s: float = 0.0
    """In collectives, with nothing else to do."""
    data_s: float = 0.0
    """Waiting for the next batch."""
    save_s: float = 0.0
    """Saving checkpoints."""
    collectives: int = 0
    wires: tuple[PeerConnection, ...] = ()
