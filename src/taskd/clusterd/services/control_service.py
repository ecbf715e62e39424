"""The Control service: declare and end jobs, report faults, show status and history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import grpc
from google.protobuf.json_format import MessageToJson

from taskd.clusterd.auth import Authority
from taskd.clusterd.cluster import declared_jobs as declare
from taskd.clusterd.job_owner import Answer, JobOwner
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.listeners import SUBSCRIBED
from taskd.core.clusterd.job_facts import MASTER, Job
from taskd.model.clusterd import FaultReport, JobRegistered, Pod
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import JobId, Rank
from taskd.model.strategies import Strategy
from taskd.runtime.clock import wall
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import Entry, JournalFailed
from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlServicer
from taskd.wire.number_check import number_problem, progress_problem
from taskd.wire.recover_codec import MAX_LIST, MAX_RANK, MAX_TEXT

INCIDENT_REPORT, OPERATOR_ACTION = "IncidentReport", "OperatorAction"
"""How the events of these lines of the history begin."""
MAX_INCIDENT_PARTS = 4_096
"""Phases, faults, ranks and links of one report. Managers send at most a quarter of that."""
REPLAYED_BYTES = 1 << 20
"""Of a history that are in memory for one reader, which may be slow."""
STEPS_AGAIN_S = 10.0
"""How old the steps of the single ranks may be for a reader that asks for changes."""


@dataclass
class Sent:
    """The large parts that one reader has received."""

    progress: pb.JobProgress | None = None
    progress_at: float = 0.0
    pods: tuple[Pod, ...] = ()

    def has_ranks(self, progress: pb.JobProgress | None) -> bool:
        """Also if only steps have changed, which are sent again after a while."""
        if progress is None or self.progress is None or self.progress is progress:
            return progress is not None and self.progress is progress
        same = progress.rank_version == self.progress.rank_version != 0
        return same and wall() - self.progress_at < STEPS_AGAIN_S


class ControlService(ControlServicer):
    def __init__(self, jobs: JobRegistry, journal: Journal, authority: Authority) -> None:
        self._jobs, self._journal, self._authority = jobs, journal, authority
        self._encoded: WeakKeyDictionary[JobOwner, tuple[int, bytes]] = WeakKeyDictionary()

    async def DeclareJob(self, request: pb.JobDeclaration, context: Any) -> pb.Answer:
        try:
            declaration = declare.declaration_of(request)
        except ValueError as error:
            return _answer(Answer.of(RecoverCode.InvalidReqParam, str(error)))
        return _answer(await self._jobs.declare(declaration))

    async def EndJob(self, request: pb.JobEnd, context: Any) -> pb.Answer:
        job = JobId(request.job)
        because = request.because[:MAX_TEXT] or f"the job ended with exit code {request.exit_code}"
        return _answer(await self._jobs.end(job, because))

    async def PublishProgress(self, request: pb.JobProgress, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        if problem := progress_problem(request):
            return _answer(Answer.of(RecoverCode.InvalidReqParam, problem))
        owner.progress = request
        owner.touch()
        return _answer(Answer.of(RecoverCode.OK))

    async def ReportSubHealth(self, request: pb.SubHealth, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        wrong = [slow.rank for slow in request.stragglers if not 0 <= slow.rank < MAX_RANK]
        if wrong or len(request.stragglers) > MAX_LIST:
            return _answer(_invalid_ranks(wrong))
        ranks = sorted({slow.rank for slow in request.stragglers})
        evidence = "; ".join(slow.evidence for slow in request.stragglers)[:MAX_TEXT]
        event = f"SubHealth {', '.join(map(str, ranks)) or 'none'}"
        because = evidence or "no rank slows the others down any more"
        answer = await self._note(owner, owner.state.job.incident, event, because)
        if answer.code == RecoverCode.OK:
            self._jobs.views.set_stragglers(owner.job, {Rank(rank) for rank in ranks})
        return _answer(answer)

    async def ReportIncident(self, request: pb.IncidentReport, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        if not 0 < request.incident <= owner.state.job.incident:
            text = f"unknown incident {request.incident}"
            return _answer(Answer.of(RecoverCode.InvalidReqParam, text))
        parts = len(request.phases) + len(request.faults)
        if parts + len(request.ranks) + len(request.links) > MAX_INCIDENT_PARTS:
            text = f"the report has too many parts (at most {MAX_INCIDENT_PARTS})"
            return _answer(Answer.of(RecoverCode.InvalidReqParam, text))
        if problem := number_problem(request):
            return _answer(Answer.of(RecoverCode.InvalidReqParam, problem))
        event = f"{INCIDENT_REPORT} {MessageToJson(request, indent=None)}"
        return _answer(await self._note(owner, request.incident, event, summary_of(request)))

    async def RecordAction(self, request: pb.OperatorAction, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        who, action = request.who[:MAX_TEXT] or "an operator", request.action[:MAX_TEXT]
        incident = owner.state.job.incident
        return _answer(await self._note(owner, incident, OPERATOR_ACTION, f"{who}: {action}"))

    async def _note(self, owner: JobOwner, incident: int, event: str, because: str) -> Answer:
        """Add a line to the job's history that is not a decision."""
        state = type(owner.state).__name__
        entry = Entry(
            job=owner.job,
            incident=incident,
            at=wall(),
            event=event,
            before=state,
            after=state,
            because=because,
        )
        try:
            await self._journal.add_entry(entry)
        except JournalFailed as error:
            return Answer.of(RecoverCode.ServerInnerError, str(error))
        owner.history += 1
        owner.touch()
        return Answer.of(RecoverCode.OK)

    async def ReportFault(self, request: pb.FaultReport, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        wrong = [f.rank for f in request.faults if not 0 <= f.rank < MAX_RANK]
        if wrong or not 0 < len(request.faults) <= MAX_LIST:
            return _answer(_invalid_ranks(wrong))
        job = owner.state.job
        if unknown := sorted({f.rank for f in request.faults if not job.has(Rank(f.rank))}):
            known = [rank for pod in job.members for rank in pod.ranks]
            expected = f"expected {min(known)} to {max(known)}" if known else "none is known yet"
            text = f"the job has no rank {', '.join(map(str, unknown[:8]))} ({expected})"
            return _answer(Answer.of(RecoverCode.InvalidReqParam, text))
        if request.drain and (refusal := why_not_drained(job, [f.rank for f in request.faults])):
            return _answer(Answer.of(RecoverCode.InvalidReqParam, refusal))
        if request.checkpoint:
            config = replace(job.config, strategies=(Strategy.DUMP,))
            allowed = await owner.ask(JobRegistered(job.id, config, job.seed, job.name))
            if allowed.code != RecoverCode.OK:
                return _answer(allowed)
        by = f"reported by {request.reporter or 'an operator'}"
        faults = tuple(
            Fault(
                Rank(fault.rank),
                FaultKind.parse(fault.fault_type),
                evidence=f"{by}: {fault.evidence}"[:MAX_TEXT] if fault.evidence else by,
                in_place=not request.drain,
            )
            for fault in request.faults
        )
        return _answer(await owner.ask(FaultReport(faults)))

    # Status and history

    async def Jobs(self, request: pb.JobsRequest, context: Any) -> pb.JobList:
        sent = dict(context.invocation_metadata() or ())
        caller = self._authority.caller(sent, context.auth_context())
        may = caller.may if caller is not None else lambda job: False
        # Nothing is made of jobs that this caller may not see: there may be thousands.
        lines = [self._line(owner) for owner in self._jobs.served.values() if may(owner.job)]
        lines += [
            pb.JobLine(
                job=one.job,
                name=one.name,
                namespace=one.namespace,
                state="Declared",
                because="no client has registered this job yet",
            )
            for one in self._jobs.waiting()
            if may(one.job)
        ]
        lines.sort(key=lambda line: line.job)
        return pb.JobList(
            jobs=lines,
            scope=caller.scope if caller is not None else "",
        )

    async def Status(self, request: pb.JobRequest, context: Any) -> pb.JobStatus:
        return self._status(await self._owner(request.job, context))

    async def Watch(self, request: pb.JobRequest, context: Any) -> None:
        owner = await self._owner(request.job, context)
        changed = owner.changes()
        try:
            await context.send_initial_metadata(SUBSCRIBED)
            over, sent = False, Sent()
            while not over:
                over = owner.closed
                if over and self._jobs.get(request.job) is owner:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
                changed.clear()
                if request.changes:
                    await context.write(self._status(owner, sent).SerializeToString())
                else:
                    await context.write(self._encoded_status(owner))
                if not over:
                    await changed.wait()
        finally:
            owner.unwatch(changed)

    def _encoded_status(self, owner: JobOwner) -> bytes:
        """One copy for all that watch the job."""
        known = self._encoded.get(owner)
        if known is None or known[0] != owner.version:
            known = self._encoded[owner] = (owner.version, self._status(owner).SerializeToString())
        return known[1]

    async def Replay(self, request: pb.ReplayRequest, context: Any) -> None:
        after, is_first = request.after, True
        while entries := await self._journal.history(
            request.job, request.incident, after, most_bytes=REPLAYED_BYTES
        ):
            is_first, after = False, entries[-1].number
            for entry in entries:
                await context.write(history_line(entry))
        if is_first and self._jobs.get(request.job) is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"the journal has no job {request.job!r}"
            )

    async def _owner(self, job: str, context: Any) -> JobOwner:
        owner = self._jobs.get(job)
        if owner is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"job {job!r} is not served here")
        assert owner is not None
        return owner

    def _line(self, owner: JobOwner) -> pb.JobLine:
        state, progress = owner.state, owner.progress
        if not owner.namespace:
            facts = self._jobs.facts(owner.job)
            owner.namespace = facts.namespace if facts else ""
        line = pb.JobLine(
            job=owner.job,
            name=state.job.name,
            namespace=owner.namespace,
            state=type(state).__name__,
            because=owner.because,
            incident=state.job.incident,
            subscribed=owner.signals.connected,
            world=sum(len(pod.ranks) for pod in state.job.members),
            changed_unix_ms=round(owner.changed_at * 1000),
        )
        if progress is not None:
            line.world = progress.world or line.world
            line.step, line.steps_per_s = progress.step, progress.steps_per_s
        return line

    def _status(self, owner: JobOwner, sent: Sent | None = None) -> pb.JobStatus:
        """Without the large parts that are in `sent`, which is updated."""
        state, progress, sent = owner.state, owner.progress, sent or Sent()
        same_ranks = sent.has_ranks(progress)
        same_places = bool(state.job.pods) and sent.pods is state.job.pods
        if not same_ranks:
            sent.progress, sent.progress_at = progress, wall()
        sent.pods = state.job.pods
        round_ = getattr(state, "round", None)
        status = pb.JobStatus(
            line=self._line(owner),
            strategies=[strategy.value for strategy in state.job.config.strategies],
            strategy=str(getattr(state, "strategy", "") or ""),
            deadline_unix_ms=0 if state.deadline == float("inf") else round(state.deadline * 1000),
            faults=[] if round_ is None else [_fault(fault) for fault in round_.faults],
            rounds=[
                pb.Round(
                    incident=past.incident,
                    began_unix_ms=round(past.began * 1000),
                    took_ms=round(past.took_s * 1000),
                    strategy=past.strategy,
                    outcome=past.outcome,
                    faults=[_fault(fault) for fault in past.faults],
                )
                for past in owner.record.rounds
            ],
            places=[
                pb.Place(rank=rank, node=pod.node, device=device)
                for pod in (() if same_places else state.job.members)
                for rank, device in zip(pod.ranks, pod.devices, strict=False)
            ],
            same_ranks=same_ranks,
            same_places=same_places,
            decision=state.job.sequence,
            history=owner.history,
        )
        if progress is not None:
            status.manager, status.profiling = progress.summary, progress.profiling
            status.operation = progress.operation
            status.stragglers.extend(progress.stragglers)
            status.goodput, status.started_unix_ms = progress.goodput, progress.started_unix_ms
            if not same_ranks:
                status.ranks.extend(progress.ranks)
                status.nodes.extend(progress.nodes)
                status.shards.extend(progress.shards)
            status.total_steps = progress.total_steps
        return status


def why_not_drained(job: Job, ranks: Sequence[int]) -> str:
    """Why the nodes of these ranks cannot be left; empty if they can."""
    nodes = set(job.nodes_of(Rank(rank) for rank in ranks))
    if nodes == set(job.places):
        return "the job has no other node: nothing could take over its ranks"
    if MASTER in nodes and not job.config.cluster:
        return "the job's manager runs on node 0: it cannot be drained"
    return ""


def summary_of(report: pb.IncidentReport) -> str:
    ranks = ", ".join(str(fault.rank) for fault in report.faults[:8]) or "none"
    ranks = f"rank{'s' * (len(report.faults) != 1)} {ranks}"
    parts = ", ".join(f"{phase.name} {phase.took_ms:.0f}" for phase in report.phases[1:])
    total = sum(phase.took_ms for phase in report.phases)
    what = f"{report.strategy or 'no strategy'}: {report.outcome or 'open'}"
    return f"{ranks}, {what} in {total:.0f} ms ({parts})"[:MAX_TEXT]


def history_line(entry: Entry) -> pb.HistoryLine:
    return pb.HistoryLine(
        number=entry.number,
        at_unix_ms=round(entry.at * 1000),
        incident=entry.incident,
        event=entry.event,
        before=entry.before,
        after=entry.after,
        because=entry.because,
        commands=entry.commands,
    )


def _fault(fault: Fault) -> pb.JobFault:
    return pb.JobFault(rank=fault.rank, fault_type=fault.kind.value, evidence=fault.evidence)


def _invalid_ranks(wrong: Sequence[int]) -> Answer:
    text = f"invalid ranks: {wrong[:8]} (expected at most {MAX_LIST} ranks of the job)"
    return Answer.of(RecoverCode.InvalidReqParam, text)


def _answer(answer: Answer) -> pb.Answer:
    return pb.Answer(code=answer.code, info=answer.info)
