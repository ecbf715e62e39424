"""Whether a job starts an etcd of its own, so that no node is special. Pure, without I/O.

Node 0 chooses, once, before any rank starts: when every node has said what it has, or as soon as it
is clear that the job has to do without. All nodes then do the same.

    waiting --every node can use it, and enough nodes can keep a copy--> use it
            --a node cannot use it, or too few can keep a copy-------->  do without
            --a node says that the job runs already------------------->  as that job does
            --a node was stopped-------------------------------------->  end

A node that cannot keep a copy still uses the copies of the others. A node that cannot even connect
(it has no certificate, or its manager could never lead) makes all of them do without, because it
could not follow the job to another leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 3
"""Two copies have no majority when one is lost: such a job would be lost with either node."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the launcher of a node says when it starts."""

    name: str
    """Of the node, for people."""
    regular: bool = True
    """False: a spare or a witness, for which the job does not wait."""
    cannot_use: str = ""
    """Why this node cannot use an etcd of the job, and what to do; empty: it can."""
    cannot_keep: str = ""
    """Why it cannot keep a copy of the job's state, and what to do; empty: it can."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A node says that the job runs already: the launcher of node 0 was started again."""

    members: tuple[str, ...] = ()
    """Where the etcd is that it uses; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The launcher of a node was stopped by a signal that ends the job."""

    because: str


Heard = Offer | Runs | Stopped


@dataclass(frozen=True, slots=True)
class Wait:
    missing: int
    """How many nodes have not said anything yet."""


@dataclass(frozen=True, slots=True)
class UseEtcd:
    because: str


@dataclass(frozen=True, slots=True)
class DoWithout:
    because: str


@dataclass(frozen=True, slots=True)
class JoinRunning:
    """Join the etcd of the running job."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    because: str


Choice = Wait | UseEtcd | DoWithout | JoinRunning | End


def choose(nodes: int, here: Offer, heard: Sequence[Heard]) -> Choice:
    """What node 0 does. `heard`: what each other node has said last."""
    for one in heard:
        if isinstance(one, Stopped):
            return End(one.because)
    for one in heard:
        if isinstance(one, Runs):
            return JoinRunning(one.members) if one.members else DoWithout("the job runs without it")
    offers = [here, *(one for one in heard if isinstance(one, Offer))]
    for offer in offers:
        if offer.cannot_use:
            return DoWithout(f"{offer.name} cannot use it: {offer.cannot_use}")
    if here.cannot_keep:
        return DoWithout(f"{here.name} must start it, and cannot: {here.cannot_keep}")
    missing = nodes - sum(one.regular for one in offers)
    if missing > 0:
        return Wait(missing)
    without = [one for one in offers if one.cannot_keep]
    copies = len(offers) - len(without)
    if copies < FEWEST:
        example = f" {without[0].name}: {without[0].cannot_keep}" if without else ""
        return DoWithout(
            f"only {copies} of {len(offers)} nodes can keep a copy of the job's state, and the "
            f"loss of one needs {FEWEST}.{example}"
        )
    return UseEtcd(f"{copies} of {len(offers)} nodes can keep a copy of the job's state")
