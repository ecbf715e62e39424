"""The job's status for operators: published to clusterd, written to summary.json.

Built from the machine's state and the ranks' heartbeats; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taskd.clusterd.records.journal_records import PastRound
from taskd.core.agent.error_text import fault_line
from taskd.core.manager.incident_record import RECORDS_KEPT
from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.repair import copy_placement as placement
from taskd.core.manager.states import Job, State
from taskd.core.manager.watch.goodput import Goodput
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.kept_incidents import with_rounds
from taskd.manager.profiling_control import ProfilingControl
from taskd.manager.reports.incident_reports import IncidentReports
from taskd.manager.reports.node_evidence import nodes_with_copies
from taskd.manager.settings import ManagerConfig
from taskd.model.ids import NodeRank, Rank
from taskd.model.manager import IncidentRecord
from taskd.model.messages import Progress
from taskd.model.strategies import LADDER
from taskd.runtime.clock import monotonic, wait_until
from taskd.runtime.files.private_files import write_private
from taskd.wire._pb import control_pb2 as control
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
SETTLING_S = 0.3
PACE_S = 5.0
"""The steps per second in a status are those of the last seconds."""
MOST_SHARDS = 256
"""Shards in a status, those at risk first."""
Copies = Mapping[NodeRank, frozenset[Rank]]
"""The ranks of whose state a copy lies in the memory of each node."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    state: State
    because: str
    progress: Mapping[int, Progress]
    profiling: ProfilingControl | None = None
    operation: str = ""
    copies: Copies = field(default_factory=dict)


def declaration(config: ManagerConfig) -> control.JobDeclaration:
    per_node = config.job.ranks_per_node
    return control.JobDeclaration(
        job=config.job_id,
        name=config.job_id,
        strategies=config.strategies or LADDER,
        nodes=[
            control.Node(node_rank=node, ranks=range(node * per_node, (node + 1) * per_node))
            for node in range(config.job.nodes)
        ],
        no_backup_nic=not config.backup_nic,
    )


async def publish(
    clusterd: ClusterdClient,
    config: ManagerConfig,
    look: Callable[[], JobSnapshot],
    changed: asyncio.Event,
    incidents: IncidentReports,
    pace: Pace,
) -> None:
    """Publish the progress soon after the job's state has changed, and its steps regularly.

    Not at once: a recovery changes the state several times and must not be slowed down.
    """
    last_published: tuple[object, ...] = ()
    last_ranks: list[object] = []
    rank_version = round(monotonic() * 1000)  # greater than that of an earlier manager
    reported_slow: frozenset[tuple[int, str]] = frozenset()
    while True:
        if await wait_until(changed, config.publish_s):
            await asyncio.sleep(min(SETTLING_S, config.publish_s))
        changed.clear()
        seen = look()
        progress = progress_of(config, seen)
        slow = frozenset((item.rank, item.cause) for item in progress.stragglers)
        if slow != reported_slow and await clusterd.report_sub_health(progress.stragglers):
            reported_slow = slow
        await send_incidents(clusterd, incidents)
        ranks: list[object] = [(r.rank, r.phase, r.pid, r.note) for r in progress.ranks]
        ranks += [n.SerializeToString() for n in (*progress.nodes, *progress.shards)]
        rank_version += ranks != last_ranks
        progress.rank_version, last_ranks = rank_version, ranks
        key = (
            progress.step,
            progress.summary,
            progress.world,
            progress.profiling,
            progress.operation,
            ranks,
            slow,
            clusterd.joined,
        )
        if key == last_published:
            continue
        now = monotonic()
        pace.update(progress, now)
        progress.steps_per_s = pace.steps_per_s(progress.step, now)
        published = await clusterd.publish(progress)
        if published is None:
            await asyncio.Event().wait()  # it never will, but this task must not end
        if published:
            last_published = key


class Pace:
    """The goodput since this manager was started, and the steps per second of the last seconds."""

    def __init__(self, now: float, wall_now: float) -> None:
        self._goodput, self._started_ms = Goodput(now), round(wall_now * 1000)
        self._recent: deque[tuple[float, int]] = deque()
        """Times and steps, the first one about PACE_S ago."""

    def steps_per_s(self, step: int, now: float) -> float:
        """A second has too few steps for a steady number. The first steps known and those after a
        restart from a checkpoint begin again."""
        if self._recent and (self._recent[-1][1] == 0 or step < self._recent[-1][1]):
            self._recent.clear()
        self._recent.append((now, step))
        while len(self._recent) > 2 and (
            self._recent[1][0] <= now - PACE_S or self._recent[0][0] < now - 2 * PACE_S
        ):
            self._recent.popleft()
        (began, first) = self._recent[0]
        return (step - first) / (now - began) if now > began else 0.0

    def update(self, progress: control.JobProgress, now: float) -> None:
        self._goodput = self._goodput.at(progress.step, now)
        progress.goodput = self._goodput.share(now)
        progress.started_unix_ms = self._started_ms


async def send_incidents(clusterd: ClusterdClient, incidents: IncidentReports) -> None:
    while incidents.waiting and await clusterd.report_incident(incidents.waiting[0]):
        incidents.waiting.pop(0)


def progress_of(config: ManagerConfig, seen: JobSnapshot) -> control.JobProgress:
    job = seen.state.job
    ranks = [_rank(seen, rank) for rank in sorted(job.view.ranks)]
    shards = shards_of(job, seen.copies)
    nodes = nodes_of(job, shards)
    summary = type(seen.state).__name__
    if seen.because:
        summary += f": {seen.because}"
    if at_risk := _at_risk(nodes):
        summary += f" | {at_risk}"
    if job.past_incidents:
        summary += f" | last: {describe_incident(job.past_incidents[-1])}"
    return control.JobProgress(
        job=config.job_id,
        step=max((rank.step for rank in ranks), default=0),
        world=len(job.world),
        summary=summary,
        ranks=ranks,
        profiling="" if seen.profiling is None else seen.profiling.describe(),
        operation=seen.operation,
        stragglers=[] if seen.profiling is None else seen.profiling.stragglers.current(),
        nodes=nodes,
        shards=sorted(shards, key=_risk)[:MOST_SHARDS],
        total_steps=max((beat.total for beat in seen.progress.values()), default=0),
    )


def shards_of(job: Job, copies: Copies) -> list[control.ShardStatus]:
    """Where each part of the state is: with the ranks that train, and in the nodes' memory."""
    names: dict[Rank, str] = {}
    replicas: dict[str, set[int]] = {}
    for rank in job.world:
        view = job.view.ranks[rank]
        if view.said_hello:
            names[rank] = view.shard
            replicas.setdefault(view.shard, set()).add(view.node)
    here = {
        node: ranks
        for node, ranks in copies.items()
        if (known := job.view.nodes.get(node)) is not None and known.present
    }
    kept = nodes_with_copies(here, names)
    return [
        control.ShardStatus(shard=shard, replicas=sorted(on), copies=sorted(kept.get(shard, ())))
        for shard, on in sorted(replicas.items())
    ]


def _risk(shard: control.ShardStatus) -> tuple[int, int, str]:
    """Few nodes first."""
    return len({*shard.replicas, *shard.copies}), len(shard.replicas), shard.shard


def nodes_of(job: Job, shards: Sequence[control.ShardStatus]) -> list[control.NodeStatus]:
    """Every node, with what only this node holds."""
    located: dict[NodeRank, int] = {}
    for rank in job.world:
        node = job.view.ranks[rank].node
        located[node] = located.get(node, 0) + 1
    held = Counter(node for shard in shards for node in shard.replicas)
    only_here = placement.shards_on_one_node(
        (shard.shard, NodeRank(node)) for shard in shards for node in shard.replicas
    )
    not_copied = placement.shards_on_one_node(
        (shard.shard, NodeRank(node))
        for shard in shards
        for node in (*shard.replicas, *shard.copies)
    )
    return [
        control.NodeStatus(
            node=node,
            host=view.host,
            present=view.present,
            spare=view.present and not located.get(node),
            problem="failed a stress test, or computes wrong gradients"
            if node in job.bad_nodes
            else "",
            leader=bool(view.store),
            ranks=located.get(node, 0),
            only_here=[shard for shard, at in only_here.items() if at == node],
            not_copied=[shard for shard, at in not_copied.items() if at == node],
            shards=held[node],
        )
        for node, view in sorted(job.view.nodes.items())
    ]


def _rank(seen: JobSnapshot, rank: Rank) -> control.RankStatus:
    job = seen.state.job
    view = job.view.ranks[rank]
    beat = seen.progress.get(rank)
    current = beat is not None and beat.incarnation == view.incarnation
    node = job.view.nodes.get(view.node)
    fault = job.faults.get(rank)
    return control.RankStatus(
        rank=rank,
        node=view.node,
        host=node.host if node else "",
        pid=view.pid,
        incarnation=view.incarnation,
        phase=view.phase
        if view.process is ProcessState.ALIVE and view.phase
        else view.process.value,
        step=max(view.step, beat.step) if beat is not None and current else view.step,
        idle_s=beat.idle_s if beat is not None and current else 0.0,
        note=f"{fault.cause}: {fault_line(fault.evidence)[:200]}" if fault else "",
    )


def _at_risk(nodes: Sequence[control.NodeStatus]) -> str:
    """Shards that would be lost with a single node."""
    alone = {node.node: len(node.not_copied) for node in nodes if node.not_copied}
    where = ", ".join(map(str, alone))
    return f"{sum(alone.values())} shards are on one node only (nodes {where})" if alone else ""


def describe_incident(record: IncidentRecord) -> str:
    """One incident in one line, with its phases in milliseconds."""
    ranks = ", ".join(str(fault.rank) for fault in record.faults) or "none"
    ranks = f"rank{'s' * (len(record.faults) != 1)} {ranks}"
    parts = " ".join(f"{name} {ms:.0f}" for name, ms in record.phases_ms().items())
    total = (record.timestamps[-1][1] - record.timestamps[0][1]) * 1000.0
    return (
        f"incident {record.incident}, {ranks}, {record.strategy or 'no strategy'}: "
        f"{record.outcome or 'open'} in {total:.0f} ms ({parts})"
    )


# Files


def write_ready(config: ManagerConfig, port: int, clusterd: str) -> None:
    ports = {"pid": os.getpid(), "port": port, "clusterd": clusterd}
    if config.ready_file is not None:
        _write(config.ready_file.parent, config.ready_file.name, ports)
    if config.ready_fd is not None:
        with os.fdopen(config.ready_fd, "w") as pipe:
            pipe.write(f"{json.dumps(ports)}\n")


class SummaryFile:
    """summary.json: every incident of the job, also those that a former manager has handled."""

    def __init__(self, config: ManagerConfig, earlier: list[Any] | None = None) -> None:
        """`earlier`: the incidents of former managers; None: as the file says."""
        self._job, self._directory = config.job_id, config.state_dir
        self._since: int | None = None if earlier is None else 0
        """The last incident of earlier runs of the job; None: this is the run's first manager."""
        if earlier is None:
            earlier = [] if self._directory is None else self._read(self._directory / SUMMARY)
        self._earlier = earlier
        self._rounds: dict[int, PastRound] = {}
        """What clusterd has decided, as far as it is known here, by incident."""

    def complete(self, rounds: Sequence[PastRound], state: State) -> None:
        """With what clusterd has decided: a manager can end before it has written an incident."""
        if self._since is None:
            self._since = max((past.incident for past in rounds), default=0)
        self._rounds |= {past.incident: past for past in rounds if past.incident > self._since}
        self.write(state)

    def write(self, state: State) -> None:
        if self._directory is None:
            return
        summary = {
            "job": self._job,
            "exit_code": getattr(state, "exit_code", None),
            "because": getattr(state, "because", ""),
            "attempts": state.job.attempt,
            "since": self._since or 0,
            "incidents": self.incidents(state),
        }
        _write(self._directory, SUMMARY, summary)

    def incidents(self, state: State) -> list[Any]:
        """The newest ones, of all managers."""
        known = [*self._earlier, *map(summary_of, state.job.past_incidents)]
        return with_rounds(known, self._rounds.values())[-RECORDS_KEPT:]

    def _read(self, file: Path) -> list[Any]:
        try:
            found = loads(file.read_text())
            incidents, ended = found["incidents"], found["exit_code"] is not None
            mine = found["job"] == self._job and not ended and isinstance(incidents, list)
            if mine:
                self._since = int(found.get("since", 0))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: earlier incidents are not shown: %s", file, error)
            return []
        return incidents if mine else []


def summary_of(record: IncidentRecord) -> dict[str, Any]:
    return {
        "incident": record.incident,
        "strategy": record.strategy,
        "outcome": record.outcome,
        "because": record.because,
        "faults": [
            {"rank": fault.rank, "kind": fault.cause, "evidence": fault.evidence}
            for fault in record.faults
        ],
        "parts_ms": record.phases_ms(),
    }


def _write(directory: Path, name: str, content: object) -> None:
    """Write atomically. A full disk must not stop the job."""
    target, draft = directory / name, directory / f".{name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_private(draft, json.dumps(content, indent=1))
        draft.replace(target)
    except OSError as error:
        log.warning("cannot write %s: %s", target, error)
