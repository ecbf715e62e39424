"""The pages as JSON: what `/api/v1/…` answers and what the report contains. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taskd.dashboard import incidents
from taskd.dashboard.incidents import QUIET, Incident
from taskd.wire._pb import control_pb2 as pb

LIVE, LOST, ENDED = "live", "lost", "ended"
"""The connection to clusterd: it answers, it does not, or the job is over."""
MOST_SHOWN = 200
"""Incidents in a list; the page of each one can still be opened by its number."""


def job(status: pb.JobStatus, found: Sequence[Incident], contact: str = LIVE) -> dict[str, Any]:
    line = status.line
    health, headline = health_of(status, contact, found)
    phases = Counter(rank.phase or "joining" for rank in status.ranks)
    leader = next((node for node in status.nodes if node.leader), None)
    return {
        "job": line.job,
        "name": line.name,
        "health": health,
        "headline": headline,
        "state": line.state,
        "because": line.because,
        "incident": line.incident,
        "step": line.step,
        "stepsPerS": pace_of(status),
        "totalSteps": status.total_steps,
        "goodput": status.goodput,
        "startedUnixMs": status.started_unix_ms,
        "changedUnixMs": line.changed_unix_ms,
        "world": line.world,
        "nodes": len(status.nodes) or len({rank.node for rank in status.ranks}),
        "spares": sum(node.spare for node in status.nodes),
        "leader": {"node": leader.node, "host": leader.host} if leader else None,
        "strategies": list(status.strategies),
        "strategy": status.strategy,
        "phases": dict(phases),
        "manager": status.manager,
        "profiling": status.profiling,
        "operation": status.operation,
        "stragglers": [
            {
                "rank": slow.rank,
                "cause": slow.cause,
                "lateMs": slow.late_ms,
                "slower": slow.slower,
                "sinceUnixMs": slow.since_unix_ms,
                "evidence": slow.evidence,
            }
            for slow in status.stragglers
        ],
        "trouble": [
            {"rank": rank.rank, "phase": rank.phase, "note": rank.note}
            for rank in status.ranks
            if rank.note
        ][:20],
        "incidents": incident_list(found),
        "lostMs": sum(
            each["tookMs"]
            for each in map(incidents.brief, found)
            if each["kind"] == "fault" and each["beganUnixMs"] >= status.started_unix_ms
        ),
    }


def health_of(
    status: pb.JobStatus, contact: str, found: Sequence[Incident] = ()
) -> tuple[str, str]:
    """One word for the colour, one sentence for people."""
    line = status.line
    if contact == LOST:
        return "unknown", "No contact to the job: this is its last known state"
    if contact == ENDED or line.state == incidents.ENDED:
        because = f": {line.because}" if line.because else ""
        given_up = found and incidents.brief(found[-1])["outcome"] in incidents.FAILED
        return "failed" if given_up else "done", f"The job has ended{because}"
    phases = {rank.phase for rank in status.ranks}
    if phases == {"unknown"}:
        return "unknown", "No contact to the job's manager: this is its last known state"
    if status.operation:
        return "paused", f"Paused: {status.operation}"
    if line.state not in QUIET:
        what = f" with {status.strategy}" if status.strategy else ""
        return "recovering", f"Recovering{what}: {line.because}"
    if not line.step and phases <= {"", "joining", "starting", "absent"}:
        return "starting", "Starting: the ranks join"
    if status.stragglers:
        slow = status.stragglers[0]
        return "slow", f"Training, slowed down by rank {slow.rank} ({slow.cause})"
    if line.state == "Shrunk":
        return "slow", f"Training with {line.world} ranks: some are missing"
    if phases & {"dead", "parked", "repairing"} and "training" not in phases:
        return "recovering", line.because or "Not training"
    return "training", "Training"


def pace_of(status: pb.JobStatus) -> float:
    """Steps per second: 0 while no rank trains, because the last known pace is not that of now."""
    if status.ranks and not any(rank.phase == "training" for rank in status.ranks):
        return 0.0
    return status.line.steps_per_s


def incident_list(found: Sequence[Incident]) -> list[dict[str, Any]]:
    """Newest first."""
    return [incidents.brief(incident) for incident in reversed(found[-MOST_SHOWN:])]


def incident(found: Sequence[Incident], number: int) -> dict[str, Any] | None:
    """The incident that contains this number."""
    for index, each in enumerate(found):
        if number in each.numbers:
            return incidents.shown(found, index)
    return None


def nodes(
    status: pb.JobStatus, found: Sequence[Incident], notes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The nodes, those with the most incidents first, and what the loss of each would cost."""
    devices = {place.rank: place.device for place in status.places}
    names = {place.rank: place.node for place in status.places}
    located: dict[int, list[pb.RankStatus]] = {}
    for rank in status.ranks:
        located.setdefault(rank.node, []).append(rank)
    blamed: dict[int, list[dict[str, Any]]] = {}
    for each in found:
        for fault in each.causes():
            node = fault["node"] if fault["node"] >= 0 else _node_of(fault["rank"], status)
            blamed.setdefault(node, []).append(
                {
                    "incident": each.number,
                    "rank": fault["rank"],
                    "device": devices.get(fault["rank"], ""),
                    "cause": fault["cause"],
                    "atUnixMs": each.lines[0].at_unix_ms,
                }
            )
    known = {node.node: node for node in status.nodes}
    for node in {*located, *blamed} - set(known):
        known[node] = pb.NodeStatus(node=node, present=True, ranks=len(located.get(node, ())))
    spares = sum(node.spare for node in known.values())
    kept_on = _kept_on(status.shards)
    slow = {each.rank: each.cause for each in status.stragglers}
    rows = []
    for node in known.values():
        ranks_here = located.get(node.node, [])
        row = _node(node, ranks_here, blamed.get(node.node, []), names)
        row["loss"], row["severity"] = loss_of(node, spares, kept_on.get(node.node, ()))
        row["slow"] = [
            {"rank": rank.rank, "cause": slow[rank.rank]}
            for rank in ranks_here
            if rank.rank in slow
        ]
        rows.append(row)
    rows.sort(key=lambda row: (-row["incidents"], row["node"]))
    return {
        "nodes": rows,
        "incidents": len([each for each in found if each.causes()]),
        "spares": spares,
        "shards": [
            {"shard": each.shard, "replicas": list(each.replicas), "copies": list(each.copies)}
            for each in status.shards
        ],
        "notes": list(notes),
    }


def _kept_on(shards: Iterable[pb.ShardStatus]) -> dict[int, list[int]]:
    """By node: the other nodes that keep copies of what is trained on this node only."""
    found: dict[int, set[int]] = {}
    for shard in shards:
        if len(shard.replicas) == 1:
            found.setdefault(shard.replicas[0], set()).update(shard.copies)
    return {node: sorted(others - {node}) for node, others in found.items()}


def _node(
    node: pb.NodeStatus,
    ranks: Sequence[pb.RankStatus],
    blamed: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> dict[str, Any]:
    per_device = Counter(each["device"] for each in blamed if each["device"])
    return {
        "node": node.node,
        "name": next((names[rank.rank] for rank in ranks if rank.rank in names), ""),
        "host": node.host or next((rank.host for rank in ranks), ""),
        "present": node.present,
        "spare": node.spare,
        "leader": node.leader,
        "problem": node.problem,
        "ranks": [rank.rank for rank in ranks][:64],
        "rankCount": node.ranks or len(ranks),
        "phases": dict(Counter(rank.phase or "joining" for rank in ranks)),
        "incidents": len({each["incident"] for each in blamed}),
        "devices": [{"device": d, "incidents": n} for d, n in per_device.most_common(16)],
        "recent": list(blamed[-5:])[::-1],
        "shards": node.shards,
        "onlyHere": list(node.only_here[:16]),
        "notCopied": list(node.not_copied[:16]),
    }


def loss_of(node: pb.NodeStatus, spares: int, kept_on: Sequence[int] = ()) -> tuple[str, str]:
    """What the loss of this node would cost now, as a sentence and as good, warn or bad."""
    if not node.present:
        return "It is already lost", "warn"
    if node.leader:
        return "The job would end: the manager and the store run here", "bad"
    if not node.ranks:
        return "Nothing: it runs no rank", "good"
    if node.not_copied:
        text = _plural(len(node.not_copied), "shard") + " would be lost"
        return f"{text}: all ranks would restart from the last checkpoint", "bad"
    source = "from replicas on other nodes"
    if node.only_here:
        where = ", ".join(map(str, kept_on[:4])) + (", …" if len(kept_on) > 4 else "")
        source = f"from copies on node {where}" if kept_on else "from copies"
    ranks = _plural(node.ranks, "rank")
    if spares:
        return f"No step: a spare takes over its {ranks}, {source}", "good"
    return f"No step, but its {ranks} wait for a node, or the job shrinks; state {source}", "warn"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def ranks(status: pb.JobStatus, node: int | None = None, most: int = 512) -> list[dict[str, Any]]:
    devices = {place.rank: place.device for place in status.places}
    return [
        {
            "rank": rank.rank,
            "node": rank.node,
            "host": rank.host,
            "device": devices.get(rank.rank, ""),
            "pid": rank.pid,
            "incarnation": rank.incarnation,
            "phase": rank.phase,
            "step": rank.step,
            "idleS": rank.idle_s,
            "note": rank.note,
        }
        for rank in status.ranks
        if node is None or rank.node == node
    ][:most]


def _node_of(rank: int, status: pb.JobStatus) -> int:
    return next((each.node for each in status.ranks if each.rank == rank), -1)
