"""Keeps this node's member of the job's etcd, and the list of members, as they should be.

Every node that could run a member does the same turn again and again: a node without a member
waits until it is added, and starts one; the member that is etcd's leader changes the list
(`core/etcd_members.py`); a member without a leader looks for proof that it is alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from taskd.agent.etcd_member import member_registry
from taskd.agent.etcd_member.member_process import MemberProcess
from taskd.agent.etcd_member.member_registry import Registered
from taskd.bus import liveness_port
from taskd.clusterd.etcd.etcd_client import EtcdClient, Member, MemberStatus
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.core import etcd_members
from taskd.core.etcd_members import (
    AddLearner,
    Contact,
    ContinueAlone,
    Enough,
    MemberSeen,
    Promote,
    Remove,
)
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

FAILED = (EtcdBusy, EtcdUnanswered)
CALL_S = 0.5
LEAVE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperConfig:
    turn_s: float = 0.3
    """How often a node looks at the list of members."""
    quick_turn_s: float = 0.05
    """The same while the members change, and while this node joins."""
    joining_s: float = 10.0
    """How long `quick_turn_s` applies after the start of a node, or after its last change."""
    silent_s: float = 3.0
    """How long a member may be silent before another node takes its place."""
    starting_s: float = 30.0
    """The same for a member whose launcher is alive: it starts, or is started again."""
    leaderless_s: float = 1.5
    """How long etcd may have no leader before a member looks for proof: several elections."""
    probe_s: float = 0.5
    """How long a liveness port may take to answer a probe."""


@dataclass
class MemberKeeper:
    me: Registered
    process: MemberProcess
    first: bool
    """This node starts the cluster; all others join it."""
    seeds: tuple[str, ...]
    """Where to find the cluster at first."""
    settings: EtcdSettings
    config: KeeperConfig = field(default_factory=KeeperConfig)
    say: Callable[[str], None] = log.warning
    """Called when the job has to wait, with the reason, and when it goes on."""
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """A majority of the members has answered."""
    _clients: dict[tuple[str, ...], EtcdClient] = field(default_factory=dict)
    _members: tuple[Member, ...] = ()
    _known: dict[str, Registered] = field(default_factory=dict)
    _proven: set[str] = field(default_factory=set)
    """Liveness ports that have accepted once: only then does a refusal prove anything."""
    _answered: dict[int, float] = field(default_factory=dict)
    _led: float = field(default_factory=monotonic)
    """When etcd last had a leader."""
    _changed: float = field(default_factory=monotonic)
    """When this node last took part in a change of the members."""
    _running: bool = False
    _cluster: int = 0
    """The id of the cluster that our member leads; 0: it does not lead."""
    _waiting: str = ""
    _refused: str = ""
    _turned: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of the members with a vote, our own first."""
        found = [
            _host_port(url)
            for one in self._members
            if not one.is_learner
            for url in one.client_urls
        ]
        if self.me.client in found:
            found.sort(key=lambda address: address != self.me.client)
        return tuple(found) or self.seeds

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members

    @property
    def leads(self) -> tuple[int, tuple[str, ...]]:
        """The id of the cluster that our member leads, or 0, and where its members are."""
        return self._cluster, self.addresses

    async def run(self) -> None:
        if self.first or self.process.has_data:
            await self._start(())
        while True:
            try:
                await (self._as_member() if self._running else self._as_candidate())
                self._refused = ""
            except FAILED as error:
                log.debug("etcd: %s", error)
            except EtcdRefused as error:
                if str(error) != self._refused:
                    self._refused = str(error)
                    self.say(self._refused)
            self._turned.set()
            self._turned.clear()
            await asyncio.sleep(self._pause_s)

    @property
    def _pause_s(self) -> float:
        is_joining = monotonic() - self._changed < self.config.joining_s
        return self.config.quick_turn_s if is_joining else self.config.turn_s

    async def turned(self) -> None:
        """Wait until the next turn is over."""
        await self._turned.wait()

    async def leave(self) -> None:
        """Before a planned end: the others need fewer votes then, and wait for nothing."""
        self.process.leaves = True
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._leave()
        except (*FAILED, EtcdRefused, TimeoutError) as error:
            log.info("etcd: this node ends without leaving: %s", error)

    async def _leave(self) -> None:
        client = self._client(*self.addresses)
        await member_registry.forget(client, self.me.name)
        mine = [one.id for one in self._members if self.me.peer_url in one.peer_urls]
        if self._running and mine and len(self._members) > 1:
            await client.remove_member(mine[0])

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        await self.process.close()

    # A node without a member

    async def _as_candidate(self) -> None:
        client = self._client(*self.addresses)
        members = await client.members()
        self._members = members
        mine = next((one for one in members if self.me.peer_url in one.peer_urls), None)
        if mine is None:
            if (await member_registry.registered(client)).get(self.me.name) != self.me:
                await member_registry.register(client, self.me)
            self.joined.set()
            return
        others = [url for one in members if one.id != mine.id for url in one.peer_urls]
        await self._start(others)

    async def _start(self, others: Sequence[str]) -> None:
        await self.process.start(others)
        self._running, self._led = True, monotonic()
        self._changed = self._led

    # A node with a member

    async def _as_member(self) -> None:
        own, self._cluster = self._client(self.me.client), 0
        try:
            status = await own.status()
        except FAILED:
            await self._look_whether_removed()
            return
        self._members = await own.members()
        if status.leader:
            self._led = monotonic()
            await self._with_leader(own, status)
        elif monotonic() - self._led > self.config.leaderless_s:
            await self._without_quorum(status)

    async def _look_whether_removed(self) -> None:
        """A member that was removed ends: its node becomes a candidate again."""
        others = [address for address in self.addresses if address != self.me.client]
        if not others or monotonic() - self._led < self.config.silent_s:
            return
        members = await self._client(*others).members()
        if all(self.me.peer_url not in one.peer_urls for one in members):
            log.warning("etcd: this node was replaced while it was cut off; it joins again")
            await self.process.stop()
            self._running, self._members = False, members

    async def _with_leader(self, own: EtcdClient, status: MemberStatus) -> None:
        if any(one.id == status.member and one.is_learner for one in self._members):
            return  # a learner answers no reads
        self._known = await member_registry.registered(own)
        if self._known.get(self.me.name) != self.me:
            await member_registry.register(own, self.me)
        if self._waiting:
            self._waiting = ""
            self.say("etcd has a majority again: the job continues")
        self.joined.set()
        await self._prove()
        if status.leader != status.member:
            return
        self._cluster = status.cluster
        seen = await asyncio.gather(*(self._look(one, status.member) for one in self._members))
        change = etcd_members.change(seen, await self._candidates(own))
        if not isinstance(change, Enough):
            self._changed = monotonic()
        match change:
            case AddLearner(node, because):
                log.info("etcd: adding %s: %s", node, because)
                await own.add_learner(self._known[node].peer_url)
            case Promote(member, because):
                await own.promote_member(member)
                log.info("etcd: member %x votes: %s", member, because)
            case Remove(member, because):
                log.warning("etcd: removing member %x: %s", member, because)
                await own.remove_member(member)
            case Enough():
                pass

    async def _without_quorum(self, status: MemberStatus) -> None:
        seen = await asyncio.gather(*(self._look(one, status.member) for one in self._members))
        decision = etcd_members.without_quorum(status.member, seen)
        if isinstance(decision, ContinueAlone):
            self.say(f"etcd: this node continues alone: {decision.because}")
            await self.process.continue_alone()
            self._led = monotonic()
        elif decision.because != self._waiting:
            self._waiting = decision.because
            self.say(f"the job cannot decide anything now: {decision.because}")

    # Contact

    async def _prove(self) -> None:
        new = [one for one in self._known.values() if one.liveness not in self._proven]
        for one, accepts in zip(new, await asyncio.gather(*map(self._accepts, new)), strict=True):
            if accepts:
                self._proven.add(one.liveness)

    async def _candidates(self, own: EtcdClient) -> list[str]:
        taken = {url for one in self._members for url in one.peer_urls}
        free = [one for one in self._known.values() if one.peer_url not in taken]
        found = []
        for one, accepts in zip(free, await asyncio.gather(*map(self._accepts, free)), strict=True):
            if accepts:
                found.append(one.name)
            elif await self._is_dead(one):
                await member_registry.forget(own, one.name)
        return found

    async def _look(self, one: Member, me: int) -> MemberSeen:
        known = next((r for r in self._known.values() if r.peer_url in one.peer_urls), None)
        name = known.name if known else one.name or one.peer_urls[0]
        return MemberSeen(one.id, name, not one.is_learner, await self._contact(one, known, me))

    async def _contact(self, one: Member, known: Registered | None, me: int) -> Contact:
        now = monotonic()
        if one.id == me or (known is not None and await self._member_answers(known)):
            self._answered[one.id] = now
            return Contact.ANSWERS
        if known is not None and await self._is_dead(known):
            return Contact.DEAD
        alive = known is not None and await self._accepts(known)
        limit_s = self.config.starting_s if alive else self.config.silent_s
        last = self._answered.setdefault(one.id, now)
        return Contact.SILENT if now - last > limit_s else Contact.ANSWERS

    async def _member_answers(self, known: Registered) -> bool:
        try:
            await self._client(known.client).status()
        except (*FAILED, EtcdRefused):
            return False
        return True

    async def _accepts(self, one: Registered) -> bool:
        return await liveness_port.is_reachable(one.liveness, self.config.probe_s)

    async def _is_dead(self, one: Registered) -> bool:
        if one.liveness not in self._proven:
            return False
        return await liveness_port.is_open(one.liveness, self.config.probe_s) is False

    def _client(self, *addresses: str) -> EtcdClient:
        if addresses not in self._clients:
            self._clients[addresses] = EtcdClient(addresses, self.settings, CALL_S)
        return self._clients[addresses]


def _host_port(url: str) -> str:
    return url.partition("://")[2]
