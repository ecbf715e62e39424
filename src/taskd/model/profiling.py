"""What profiling can record of a training job, and how a profiled rank reports its pace.

The five parts are switched by name (the JSON of Ascend's ConfigMap); inside a node the switch is
one word of bits. `worker/` records, `stragglers.py` judges the paces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag

from taskd.model.ids import Incarnation, Rank


class Part(IntFlag):
    """What is recorded. The bits are a format in shared memory: do not renumber them."""

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
"""The state of a domain, as in code 14DC."""


def parts_of(switch: Mapping[str, object]) -> Part:
    """The parts that a switch turns on. Only the exact text "on" counts."""
    return parts_named(key for key in KEYS if switch.get(key) == "on")


def parts_named(names: Iterable[str]) -> Part:
    wanted = NOTHING
    for name in names:
        wanted |= KEYS.get(name, NOTHING)
    return wanted


def parts_ordered(default_domain: bool, communication: bool, names: Iterable[str]) -> Part:
    """The parts that a bus message turns on: two domains or, from our own manager, names."""
    if exact := parts_named(names):
        return exact
    wanted = DEFAULT_DOMAIN if default_domain else NOTHING
    return wanted | Part.COMMUNICATION if communication else wanted


def names_of(parts: Part) -> tuple[str, ...]:
    """On the wire."""
    return tuple(name for name, part in KEYS.items() if part & parts)


def words_of(parts: Part) -> tuple[str, ...]:
    """For people: as in `taskd profile --domains`."""
    return tuple(str(part.name).lower() for part in Part if part & parts)


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """One connection of a rank to a peer: the kernel's counters since it was opened."""

    here: str
    """address:port of our end"""
    there: str
    sent_bytes: int
    busy_s: float
    """How long our bytes were in flight while the peer was ready to receive."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a rank spends its time: sums since recording began. The difference of two is a rate."""

    rank: Rank
    incarnation: Incarnation
    recorded: Part
    """What is recorded now."""
    problem: str = ""
    """Why something that was requested is not recorded, or not kept; empty: no problem."""
    steps: int = 0
    total_s: float = 0.0
    """Duration of all these steps."""
    wait_s: float = 0.0
    """Waiting in collectives."""
    data_s: float = 0.0
    """Waiting for the next batch."""
    save_s: float = 0.0
    """Saving checkpoints."""
    collectives: int = 0
    wires: tuple[PeerConnection, ...] = ()
