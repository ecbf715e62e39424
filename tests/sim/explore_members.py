"""Exhaustive search: `core/etcd_members.py` on a model of etcd, in all interleavings.

The model is etcd's log of changes of its members. A change is committed by a majority of the votes
before it. Every member that took part has stored it, but learns only with the next change that it
was committed: until then its own list is one change behind. Nodes die, are cut off and come back at
any point, and join again as new members.

Checked in each state: at most one cluster can commit anything, now or after any return of a node
that is cut off; and a member that continues alone loses at most one change that it could not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from taskd.core import etcd_members
from taskd.core.etcd_members import (
    AddLearner,
    Contact,
    ContinueAlone,
    MemberSeen,
    Promote,
    Remove,
    majority,
)


@dataclass(frozen=True, slots=True)
class Config:
    voters: frozenset[int]
    learners: frozenset[int] = frozenset()

    @property
    def members(self) -> frozenset[int]:
        return self.voters | self.learners


@dataclass(frozen=True, slots=True)
class Node:
    """One incarnation of a launcher; its member is in at most one cluster."""

    machine: int
    alive: bool = True
    cut: bool = False
    """It reaches no other machine."""
    view: Config | None = None
    """The members as it knows them. None: it has no member."""
    behind: int = 0
    """How many committed changes it does not know: 0, 1, or more."""
    stored: bool = True
    """It has all committed changes, known to be committed or not."""
    lineage: int = 0
    """How many clusters were made by a member that continued alone, before this one."""


@dataclass(frozen=True, slots=True)
class World:
    nodes: tuple[Node, ...]
    faults_left: int
    committed: tuple[Config | None, ...]
    """The members of each cluster; None: all of it is dead."""


class MembersExplorer:
    def __init__(self, machines: int, faults: int, most: int = 6) -> None:
        self.machines, self.faults, self.most = machines, faults, most
        self.visited: set[World] = set()
        self.endings: set[str] = set()

    def run(self) -> int:
        first = Config(frozenset({0}))
        others = (Node(machine) for machine in range(1, self.machines))
        start = World((Node(0, view=first), *others), self.faults, (first,))
        stack: list[tuple[World, tuple[str, ...]]] = [(start, ())]
        self.visited = {start}
        while stack:
            world, record = stack.pop()
            for what, after in self._moves(world):
                after = _without_dead_clusters(after)
                if after not in self.visited:
                    self._check(after, (*record, what))
                    self.visited.add(after)
                    stack.append((after, (*record, what)))
        return len(self.visited)

    # What can happen next

    def _moves(self, world: World) -> Iterator[tuple[str, World]]:
        for number, node in enumerate(world.nodes):
            if not node.alive:
                continue
            if world.faults_left:
                for what, change in (("dies", {"alive": False}), ("is cut off", {"cut": True})):
                    if not (what == "is cut off" and node.cut):
                        yield f"{number} {what}", self._put(world, number, fault=1, **change)
            if node.cut:
                yield f"{number} is back", self._put(world, number, cut=False)
            if node.view is not None:
                yield from self._learns(world, number)
                if (leads := self._quorum(world, number)) is None:
                    yield from self._alone(world, number)
                else:
                    yield from self._change(world, number, leads)
        if len(world.nodes) < self.most:
            for machine in range(self.machines):
                if not any(node.alive and node.machine == machine for node in world.nodes):
                    again = replace(world, nodes=(*world.nodes, Node(machine)))
                    yield f"a launcher is started again on machine {machine}", again

    def _put(self, world: World, number: int, fault: int = 0, **change: Any) -> World:
        nodes = list(world.nodes)
        nodes[number] = replace(nodes[number], **change)
        return replace(world, nodes=tuple(nodes), faults_left=world.faults_left - fault)

    def _learns(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        """A follower hears from a member with all changes what is committed."""
        node = world.nodes[number]
        config = self._committed(world, node)
        whole = replace(node, view=config, behind=0, stored=True)
        if node == whole or node.cut or number not in config.members:
            return
        if any(
            peer.alive and not peer.cut and peer.stored and peer.lineage == node.lineage
            for other, peer in enumerate(world.nodes)
            if other != number and other in config.members and peer.view is not None
        ):
            nodes = list(world.nodes)
            nodes[number] = whole
            yield f"{number} learns", replace(world, nodes=tuple(nodes))

    def _committed(self, world: World, node: Node) -> Config:
        config = world.committed[node.lineage]
        assert config is not None
        return config

    def _quorum(self, world: World, number: int) -> frozenset[int] | None:
        """The voters that a leader at this member reaches; None: it cannot commit."""
        node = world.nodes[number]
        config = self._committed(world, node)
        if number not in config.voters or not node.stored:
            return None
        reached = {number}
        for other in config.voters - {number}:
            peer = world.nodes[other]
            same = peer.lineage == node.lineage and peer.view is not None
            if peer.alive and same and not (node.cut or peer.cut):
                reached.add(other)
        return frozenset(reached) if len(reached) >= majority(len(config.voters)) else None

    def _seen(self, world: World, number: int, config: Config) -> list[MemberSeen]:
        return [
            MemberSeen(
                other, str(other), other in config.voters, self._contact(world, number, other)
            )
            for other in sorted(config.members)
        ]

    def _contact(self, world: World, number: int, other: int) -> Contact:
        me, peer = world.nodes[number], world.nodes[other]
        if other == number:
            return Contact.ANSWERS
        if me.cut or peer.cut:
            return Contact.SILENT
        if not peer.alive:
            return Contact.DEAD
        same = peer.view is None or peer.lineage == me.lineage
        return Contact.ANSWERS if same else Contact.SILENT

    def _change(
        self, world: World, number: int, reached: frozenset[int]
    ) -> Iterator[tuple[str, World]]:
        node = world.nodes[number]
        config = self._committed(world, node)
        candidates = (
            []
            if node.cut
            else [
                str(other)
                for other, peer in enumerate(world.nodes)
                if other not in config.members and peer.alive and not peer.cut and peer.view is None
            ]
        )
        decision = etcd_members.change(self._seen(world, number, config), candidates)
        match decision:
            case AddLearner(name, _):
                after = replace(config, learners=config.learners | {int(name)})
            case Promote(member, _):
                after = Config(config.voters | {member}, config.learners - {member})
            case Remove(member, _):
                after = Config(config.voters - {member}, config.learners - {member})
            case _:
                self.endings.add(f"{len(config.voters)} members")
                return
        yield f"{number}: {decision}", self._commit(world, number, after, reached)

    def _commit(self, world: World, number: int, config: Config, reached: frozenset[int]) -> World:
        """The leader knows that it is committed; the others that it reaches have stored it."""
        lineage = world.nodes[number].lineage
        before = self._committed(world, world.nodes[number])
        nodes = list(world.nodes)
        for other in before.members | config.members:
            node = nodes[other]
            hears = node.alive and not node.cut and not nodes[number].cut
            if other == number:
                nodes[other] = replace(node, view=config, behind=0)
            elif other not in config.members and hears:
                # It hears that it was removed, and may join again.
                nodes[other] = Node(node.machine, cut=node.cut, lineage=lineage)
            elif other in reached or (other in config.learners and hears):
                nodes[other] = replace(node, view=before, behind=1, stored=True, lineage=lineage)
            elif node.view is not None and node.lineage == lineage:
                nodes[other] = replace(node, behind=min(node.behind + 1, 2), stored=False)
        committed = list(world.committed)
        committed[lineage] = config
        return replace(world, nodes=tuple(nodes), committed=tuple(committed))

    def _alone(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        node = world.nodes[number]
        assert node.view is not None
        if number not in node.view.voters:
            return
        decision = etcd_members.without_quorum(number, self._seen(world, number, node.view))
        if not isinstance(decision, ContinueAlone):
            self.endings.add("waits")
            return
        self.endings.add("continues alone")
        assert node.behind <= 1, f"{number} continues without several changes"
        alone = Config(frozenset({number}))
        nodes = list(world.nodes)
        nodes[number] = Node(node.machine, cut=node.cut, view=alone, lineage=len(world.committed))
        after = replace(world, nodes=tuple(nodes), committed=(*world.committed, alone))
        yield f"{number} continues alone", after

    # What must hold

    def _check(self, world: World, record: tuple[str, ...]) -> None:
        """At most one lineage has a majority among the nodes that live, cut off or not."""
        able = []
        for lineage, config in enumerate(world.committed):
            if config is None:
                continue
            alive = [
                voter
                for voter in config.voters
                if (node := world.nodes[voter]).alive and node.lineage == lineage and node.view
            ]
            if len(alive) >= majority(len(config.voters)):
                able.append(lineage)
        assert len(able) <= 1, "two clusters can decide:\n  " + "\n  ".join(record)


def _without_dead_clusters(world: World) -> World:
    """States that differ only in what is dead are the same."""
    used = {node.lineage for node in world.nodes if node.alive and node.view is not None}
    committed = tuple(
        config if lineage in used else None for lineage, config in enumerate(world.committed)
    )
    nodes = tuple(node if node.alive else Node(node.machine, alive=False) for node in world.nodes)
    return World(nodes, world.faults_left, committed)
