"""The lease of a job's leader, on a lease of etcd: the candidates of all nodes wait for its end.

No candidate polls: etcd reports the end of the lease. The leader's process has a liveness port, and
a candidate that sees it refuse has proof of its death: it revokes the lease, and no time is lost.
A leader that is silent loses its lease when it has not renewed it in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex

from taskd.bus import liveness_port
from taskd.clusterd.etcd.etcd_client import EtcdClient, delete, has_value, is_at, is_missing, put
from taskd.clusterd.etcd.etcd_errors import LeaseNotFound
from taskd.clusterd.etcd.job_terms import FAILED, WAITS, JobTerms, value_of
from taskd.core.election import (
    Candidacy,
    Claim,
    Follow,
    JobOver,
    NotYet,
    OldBackup,
    Tenure,
    Term,
)
from taskd.core.record import StoreUnreachable
from taskd.runtime.clock import Clock, monotonic
from taskd.wire._pb import etcd_pb2 as pb

log = logging.getLogger(__name__)

LENGTH_S = 3.0
"""How long a leader may be silent. etcd makes it longer if its own elections take longer."""
PERIOD_S = 0.5
ANSWER_S = 1.0


class JobLease:
    """Implements `core.record.Lease` for the candidate of one node."""

    def __init__(
        self, client: EtcdClient, terms: JobTerms, me: Term, clock: Clock = monotonic
    ) -> None:
        """`me`: the term that this candidate offers, with the newest epoch that its node knows."""
        self._client, self._terms, self._clock = client, terms, clock
        self._candidacy, self._tenure, self._me = Candidacy(me.node, me.epoch), Tenure(), me
        self._lease = 0
        self._deaths: dict[int, asyncio.Task[None]] = {}

    @property
    def held(self) -> bool:
        return self._tenure.holds(self._clock())

    @property
    def run(self) -> str:
        """Of the term that this process leads."""
        return self._me.run

    @property
    def is_ours(self) -> Callable[[], pb.Compare]:
        """The condition of all our writes: our term has not ended."""
        return lambda: has_value(self._terms.leader_key, value_of(self._me))

    async def acquire(self) -> int:
        """Wait until this process leads."""
        changed = asyncio.Event()
        watching = asyncio.create_task(self._terms.follow(changed))
        try:
            return await self._campaign(changed)
        finally:
            for task in (watching, *self._deaths.values()):
                task.cancel()
            self._deaths.clear()

    async def _campaign(self, changed: asyncio.Event) -> int:
        problem = ""
        while True:
            changed.clear()
            try:
                decision = self._candidacy.consider(await self._terms.look())
                match decision:
                    case Claim(epoch):
                        if await self._claim(epoch):
                            return epoch
                        continue
                    case JobOver():
                        log.info("the job has ended: no further leader is needed")
                        await asyncio.Event().wait()
                    case Follow(term):
                        self._watch_for_death(term)
                    case NotYet(because):
                        log.info("this node does not lead yet: %s", because)
                    case OldBackup(because):
                        raise StoreUnreachable(because)
                problem = ""
            except StoreUnreachable as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("this node cannot lead: %s", problem)
                await asyncio.sleep(PERIOD_S)
                continue
            await changed.wait()

    async def _claim(self, epoch: int) -> bool:
        sent_at = self._clock()
        terms = self._terms
        self._me = replace(self._me, epoch=epoch, run=terms.run or token_hex(8))
        try:
            self._lease, length_s = await self._client.grant(LENGTH_S)
            conditions = [
                is_missing(terms.leader_key),
                is_at(terms.epoch_key, terms.epoch_revision),
            ]
            writes = [
                put(terms.leader_key, value_of(self._me), self._lease),
                put(terms.epoch_key, str(epoch).encode()),
                put(terms.run_key, self._me.run.encode()),
            ]
            if (await self._client.transact(conditions, writes)).succeeded:
                self._tenure.begin(epoch, sent_at, length_s)
                return True
            await self._client.revoke(self._lease)
        except LeaseNotFound:
            return False
        except FAILED as error:
            raise StoreUnreachable(f"cannot claim the lease: {error}; {WAITS}") from error
        return False

    def _watch_for_death(self, term: Term) -> None:
        if term.liveness_port and term.epoch not in self._deaths:
            lease = self._terms.lease
            self._deaths[term.epoch] = asyncio.create_task(self._revoke_on_death(term, lease))

    async def _revoke_on_death(self, term: Term, lease: int) -> None:
        """A port that never answered here proves nothing when it refuses later."""
        if not await liveness_port.is_reachable(term.liveness_port, ANSWER_S):
            return
        if not await liveness_port.wait_for_exit(term.liveness_port, ANSWER_S):
            return  # silent: its lease ends by itself
        log.warning("the manager on node %d has ended: its lease is revoked", term.node)
        with suppress(LeaseNotFound, *FAILED):
            await self._client.revoke(lease)

    async def renew(self) -> bool:
        sent_at = self._clock()
        try:
            self._tenure.renewed(sent_at, await self._client.renew(self._lease))
        except LeaseNotFound:
            self._tenure.end()
        except FAILED as error:
            raise StoreUnreachable(f"{error}; {WAITS}") from error
        return self._tenure.epoch is not None

    async def end_job(self) -> None:
        """The job is over: no candidate takes over, and the next job of this name starts fresh."""
        terms = self._terms
        stale = [
            terms.summary_key,
            terms.run_key,
            *map(terms.node_key, await terms.liveness_ports()),
        ]
        await self._change(put(terms.ended_key, str(self._me.epoch).encode()))
        for key in stale:
            await self._change(delete(key))

    async def save_summary(self, packed: bytes) -> None:
        await self._change(put(self._terms.summary_key, packed))

    async def release(self) -> None:
        if self._tenure.epoch is None:
            return
        self._tenure.end()
        try:
            await self._client.revoke(self._lease)
        except LeaseNotFound:
            pass
        except FAILED as error:
            raise StoreUnreachable(f"cannot release the lease: {error}") from error

    async def _change(self, change: pb.RequestOp) -> None:
        """Raises StoreUnreachable. A leader whose term is over changes nothing."""
        try:
            await self._client.transact([self.is_ours()], [change])
        except FAILED as error:
            raise StoreUnreachable(f"cannot write: {error}") from error
