"""Which nodes run a member of the job's etcd now. Pure, without I/O.

A new member starts as a learner, without a vote, and gets its vote once it has all data: a node
that dies while it joins blocks nothing. A member that is proved dead is removed. One that is only
silent stays, unless another node can take its place: it may come back with its data.

Two members alone cannot decide after one of them has fallen silent. The other one continues alone
only on proof of death, and only if its own list has no third member. That is sound: with two votes
nothing is committed without both, so the survivor has seen every change that came before. A third
member would be in its list as a learner before it could vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

MOST = 5
"""More members make writes slower, and the loss of three nodes at once is rare."""


class Contact(Enum):
    ANSWERS = auto()
    SILENT = auto()
    """It has not answered for a while. That proves nothing."""
    DEAD = auto()
    """Its machine answers, and its launcher has ended."""


@dataclass(frozen=True, slots=True)
class MemberSeen:
    id: int
    name: str
    """Of its node, for people."""
    votes: bool
    """False: a learner."""
    contact: Contact


@dataclass(frozen=True, slots=True)
class AddLearner:
    node: str
    because: str


@dataclass(frozen=True, slots=True)
class Promote:
    member: int
    because: str


@dataclass(frozen=True, slots=True)
class Remove:
    member: int
    because: str


@dataclass(frozen=True, slots=True)
class ContinueAlone:
    """Make a cluster of this member alone, with its data."""

    because: str


@dataclass(frozen=True, slots=True)
class Wait:
    because: str


@dataclass(frozen=True, slots=True)
class Enough:
    """Nothing is to be done."""


Change = AddLearner | Promote | Remove | Enough


def wanted(nodes: int) -> int:
    """How many members such a number of nodes should have: an odd number, as far as possible."""
    return min(nodes, MOST) if nodes <= 2 else min(nodes - (nodes + 1) % 2, MOST)


def majority(votes: int) -> int:
    return votes // 2 + 1


def change(members: Sequence[MemberSeen], candidates: Sequence[str]) -> Change:
    """The next change of the members, decided by etcd's own leader.

    `candidates` are the nodes that answer, could run a member and run none, in order of preference.
    """
    for one in members:
        if one.contact is Contact.DEAD:
            return Remove(one.id, f"{one.name} is dead: its machine answers, its launcher does not")
    voters = [one for one in members if one.votes]
    silent = [one for one in voters if one.contact is Contact.SILENT]
    for one in members:
        if not one.votes and one.contact is Contact.SILENT:
            return Remove(one.id, f"{one.name} is silent and has no vote yet")
    if silent and candidates:
        return Remove(
            silent[0].id, f"{silent[0].name} is silent, and {candidates[0]} can replace it"
        )
    if silent and majority(len(voters) - len(silent)) < majority(len(voters)):
        return Remove(
            silent[0].id, f"{silent[0].name} is silent: without it fewer votes are needed"
        )
    alive = [one for one in members if one.contact is Contact.ANSWERS]
    want = wanted(len(alive) + len(candidates))
    learners = [one for one in alive if not one.votes]
    if learners:
        if len(voters) < want:
            return Promote(learners[0].id, f"{learners[0].name} answers")
        return Enough()
    if len(voters) < want and candidates:
        return AddLearner(candidates[0], f"{want} members are wanted, and {len(voters)} exist")
    return Enough()


def without_quorum(me: int, members: Sequence[MemberSeen]) -> ContinueAlone | Wait:
    """What the member `me` does while etcd has no leader. Each member decides it for itself."""
    others = [one for one in members if one.id != me]
    dead = [one.name for one in others if one.contact is Contact.DEAD]
    missing = ", ".join(one.name for one in others if one.contact is not Contact.ANSWERS)
    if len(others) == 1 and len(dead) == 1:
        return ContinueAlone(f"{dead[0]}, the only other member, is dead")
    if len(others) == 1:
        return Wait(
            f"{missing or others[0].name} is silent, and two members cannot know which of them is "
            "cut off. The job continues when it answers, or when its machine answers without it. A "
            "spare or `taskd run --witness` on a third machine prevents this"
        )
    if not missing:
        return Wait(
            f"the {len(members)} members answer, but have not elected a leader. The job continues "
            "when they have: it takes a few seconds, longer if the machines are very busy"
        )
    return Wait(
        f"no majority of the {len(members)} members answers (missing: {missing}). The job "
        "continues when enough of them answer again"
    )
