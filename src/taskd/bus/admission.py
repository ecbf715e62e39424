"""Admits calls to the bus server: not too many, and only from peers that prove their position."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from taskd.bus.job_secrets import JobSecrets
from taskd.bus.security import (
    JOB_KEY,
    RUN_KEY,
    TOKEN_KEY,
    check_token,
    is_certified,
    names_positions,
)
from taskd.model.ids import Position
from taskd.runtime.clock import Clock, monotonic
from taskd.runtime.limits.rate_limit import Buckets, Rate
from taskd.runtime.limits.refused_callers import RefusedCallers

log = logging.getLogger(__name__)

MAX_CALLS_PER_S = 10_000
LOG_RATE, LOGGED_HOSTS = Rate(0.1, 20), 1000
"""Of refusals, for each machine: a peer that tries forever must not fill the disk."""
MAX_REASON = 300
"""Of a refusal, in characters: a peer may claim a position with a long name."""
Context = grpc.aio.ServicerContext[Any, Any]
Problem = tuple[grpc.StatusCode, str] | None


class Admission:
    def __init__(
        self,
        *,
        job: str = "",
        secrets: JobSecrets | None = None,
        tls: bool = False,
        run: str = "",
        max_calls_per_s: int = MAX_CALLS_PER_S,
        clock: Clock = monotonic,
    ) -> None:
        self._job = job
        self._secrets = secrets or JobSecrets("")
        self._tls, self._run = tls, run
        self._rate = max_calls_per_s
        self._clock = clock
        self._tokens = float(max_calls_per_s)
        self._filled_at = clock()
        self._logged = Buckets(LOG_RATE, LOGGED_HOSTS, clock)
        self.refused = RefusedCallers(clock)

    async def admit_caller(self, context: Context) -> None:
        """The same before the request is read, for the position that its metadata names."""
        if self._checks:
            await self._check(context, claimed_position(_metadata(context)))

    async def admit(self, context: Context, claimed: Position | None) -> None:
        """Return, or end the call with a gRPC status that says why it was refused."""
        if self._checks:
            await self._check(context, claimed)  # strangers must not use up the rate of members
        if not self._take_one():
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {self._rate} calls per second"
            )

    async def _check(self, context: Context, claimed: Position | None) -> None:
        problem = self._problem(context, claimed)
        if problem is None:
            return
        self.refused.note(context.peer())
        status, text = problem
        host = str(context.peer()).rpartition(":")[0]
        if self._logged.take(host):
            log.warning(
                "call refused: peer=%s position=%.100s: %.200s", context.peer(), claimed, text
            )
        await context.abort(status, text[:MAX_REASON])

    def is_admitted(self, context: Context, claimed: Position) -> bool:
        """Whether a caller that was admitted before would be so now: secrets may be renewed."""
        return not self._checks or self._problem(context, claimed) is None

    @property
    def _checks(self) -> bool:
        return self._tls or bool(self._secrets.accepted) or bool(self._run)

    def _problem(self, context: Context, claimed: Position | None) -> Problem:
        accepted = self._secrets.accepted
        problem = _token_problem(_metadata(context), self._job, accepted, claimed)
        if accepted and problem is not None:
            return problem
        run = _metadata(context).get(RUN_KEY, "")
        if self._run and run and run != self._run:
            # Its own manager is elsewhere: see `core.election.Term.run`.
            text = "wrong run: this server belongs to another run of the job"
            return grpc.StatusCode.PERMISSION_DENIED, text
        return self._certificate_problem(context, claimed) if self._tls else None

    def _certificate_problem(self, context: Context, claimed: Position | None) -> Problem:
        uris = context.auth_context().get("peer_uri", ())
        names = [uri.decode(errors="replace") for uri in uris]
        if not names_positions(names):
            if self._secrets.accepted:
                return None  # the token proves the position
            text = "without a job token the certificate must name its position "
            return grpc.StatusCode.PERMISSION_DENIED, text + "(taskd://job/role/rank/rank)"
        if claimed is not None and is_certified(names, self._job, claimed):
            return None
        return grpc.StatusCode.PERMISSION_DENIED, f"the certificate is not for {claimed}"

    def _take_one(self) -> bool:
        now = self._clock()
        earned = (now - self._filled_at) * self._rate
        self._tokens = min(float(self._rate), self._tokens + earned)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _token_problem(
    metadata: dict[str, str], own: str, secrets: Sequence[str], claimed: Position | None
) -> Problem:
    """Why this caller has no token of job `own` for that position."""
    token, job = metadata.get(TOKEN_KEY), metadata.get(JOB_KEY, "")
    if not token:
        return grpc.StatusCode.UNAUTHENTICATED, "a job token is required"
    if job != own:
        return (
            grpc.StatusCode.PERMISSION_DENIED,
            "wrong job: this server belongs to another one",
        )
    if claimed is None:
        return grpc.StatusCode.PERMISSION_DENIED, "a position is required"
    if not any([check_token(token, secret, job, claimed) for secret in secrets]):
        return grpc.StatusCode.PERMISSION_DENIED, f"the token is not for {claimed}"
    return None


def claimed_position(metadata: dict[str, str]) -> Position | None:
    """The position that our own clients name in the metadata of each call."""
    names = ("role", "serverrank", "processrank")
    if any(name not in metadata for name in names):
        return None
    return Position(*(metadata[name] for name in names))


def _metadata(context: Context) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or ()}
