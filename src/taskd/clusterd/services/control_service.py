"""The Control service: declare and end jobs, report faults, show status and history."""

from __future__ import annotations

from typing import Any

import grpc

from taskd.clusterd.auth import Authority
from taskd.clusterd.cluster import declared_jobs as declare
from taskd.clusterd.job_owner import Answer, JobOwner
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.listeners import SUBSCRIBED
from taskd.model.clusterd import FaultReport
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import JobId, Rank
from taskd.runtime.clock import wall
from taskd.runtime.journal import Entry, Journal, JournalFailed
from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlServicer
from taskd.wire.recover_codec import MAX_RANK, MAX_TEXT


class ControlService(ControlServicer):
    def __init__(self, jobs: JobRegistry, journal: Journal, authority: Authority) -> None:
        self._jobs, self._journal, self._authority = jobs, journal, authority

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
        owner.progress = request
        owner.touch()
        return _answer(Answer.of(RecoverCode.OK))

    async def ReportSubHealth(self, request: pb.SubHealth, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        wrong = [slow.rank for slow in request.stragglers if not 0 <= slow.rank < MAX_RANK]
        if wrong:
            return _answer(Answer.of(RecoverCode.InvalidReqParam, f"invalid ranks: {wrong}"))
        ranks = sorted({slow.rank for slow in request.stragglers})
        evidence = "; ".join(slow.evidence for slow in request.stragglers)[:MAX_TEXT]
        state = type(owner.state).__name__
        entry = Entry(
            job=owner.job,
            incident=owner.state.job.incident,
            at=wall(),
            event=f"SubHealth {', '.join(map(str, ranks)) or 'none'}",
            before=state,
            after=state,
            because=evidence or "no rank slows the others down any more",
        )
        try:
            await self._journal.add_entry(entry)
        except JournalFailed as error:
            return _answer(Answer.of(RecoverCode.ServerInnerError, str(error)))
        self._jobs.set_stragglers(owner.job, {Rank(rank) for rank in ranks})
        return _answer(Answer.of(RecoverCode.OK))

    async def ReportFault(self, request: pb.FaultReport, context: Any) -> pb.Answer:
        owner = self._jobs.get(request.job)
        if owner is None:
            return _answer(Answer.of(RecoverCode.UnRegistry))
        wrong = [f.rank for f in request.faults if not 0 <= f.rank < MAX_RANK]
        if wrong or not request.faults:
            return _answer(Answer.of(RecoverCode.InvalidReqParam, f"invalid ranks: {wrong}"))
        job = owner.state.job
        if unknown := sorted({f.rank for f in request.faults if not job.has(Rank(f.rank))}):
            known = [rank for pod in job.members for rank in pod.ranks]
            expected = f"expected {min(known)} to {max(known)}" if known else "none is known yet"
            text = f"the job has no rank {', '.join(map(str, unknown))} ({expected})"
            return _answer(Answer.of(RecoverCode.InvalidReqParam, text))
        by = f"reported by {request.reporter or 'an operator'}"
        faults = tuple(
            Fault(
                Rank(fault.rank),
                FaultKind.parse(fault.fault_type),
                evidence=f"{by}: {fault.evidence}"[:MAX_TEXT] if fault.evidence else by,
            )
            for fault in request.faults
        )
        return _answer(await owner.ask(FaultReport(faults)))

    # Status and history

    async def Jobs(self, request: pb.JobsRequest, context: Any) -> pb.JobList:
        sent = dict(context.invocation_metadata() or ())
        caller = self._authority.caller(sent, context.auth_context())
        return pb.JobList(
            jobs=[
                self._line(owner)
                for job, owner in sorted(self._jobs.served.items())
                if caller is not None and caller.may(job)
            ]
        )

    async def Status(self, request: pb.JobRequest, context: Any) -> pb.JobStatus:
        return self._status(await self._owner(request.job, context))

    async def Watch(self, request: pb.JobRequest, context: Any) -> None:
        owner = await self._owner(request.job, context)
        changed = owner.changes()
        try:
            await context.send_initial_metadata(SUBSCRIBED)
            over = False
            while not over:
                over = owner.closed
                if over and self._jobs.get(request.job) is owner:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
                changed.clear()
                await context.write(self._status(owner))
                if not over:
                    await changed.wait()
        finally:
            owner.unwatch(changed)

    async def Replay(self, request: pb.ReplayRequest, context: Any) -> None:
        entries = await self._journal.history(request.job, request.incident)
        if not entries and self._jobs.get(request.job) is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"the journal has no job {request.job!r}"
            )
        for entry in entries:
            await context.write(history_line(entry))

    async def _owner(self, job: str, context: Any) -> JobOwner:
        owner = self._jobs.get(job)
        if owner is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"job {job!r} is not served here")
        assert owner is not None
        return owner

    def _line(self, owner: JobOwner) -> pb.JobLine:
        state, progress = owner.state, owner.progress
        facts = self._jobs.facts(owner.job)
        line = pb.JobLine(
            job=owner.job,
            name=state.job.name,
            namespace=facts.namespace if facts else "",
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

    def _status(self, owner: JobOwner) -> pb.JobStatus:
        state, progress = owner.state, owner.progress
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
                for pod in state.job.members
                for rank, device in zip(pod.ranks, pod.devices, strict=False)
            ],
            decision=state.job.sequence,
        )
        if progress is not None:
            status.manager, status.profiling = progress.summary, progress.profiling
            status.ranks.extend(progress.ranks)
            status.operation = progress.operation
            status.stragglers.extend(progress.stragglers)
        return status


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


def _answer(answer: Answer) -> pb.Answer:
    return pb.Answer(code=answer.code, info=answer.info)
