"""Which node is silent: its heartbeats are missing, and its machine does not answer either.

A late heartbeat proves little: the agent may starve on a loaded machine, or the manager itself may
be slow. So a late node is probed, and the state of the TCP connection is inspected: the kernel of
the other machine acknowledges data without the help of its processes. Therefore

    late  ->  probe  ->  acknowledged by its machine      alive; its agent gets more time
                     ->  not acknowledged                 silent, after a fraction of a second
                     ->  unknown (no direct connection)   silent, after a longer time

What counts as late is learned from the node's own heartbeats, and the time for an acknowledgement
from TCP's own estimate: both grow with load and with distance. `manager/node_liveness.py` sends the
probes and inspects the connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import assert_never

from taskd.model import types
from taskd.model.bus import TcpState
from taskd.model.ids import NodeRank
from taskd.model.types import Tick


@dataclass(frozen=True, kw_only=True, slots=True)
class SilenceConfig:
    late_beats: float = 1.25
    """A heartbeat is late after this many times the longest recent interval …"""

    late_floor_s: float = 0.5
    """… but at the earliest after this time."""

    known_beats: int = 4
    """The interval of a node is known after this many heartbeats …"""

    unknown_late_s: float = 1.0
    """… and before that a heartbeat is late after this time."""

    unconfirmed_s: float = 0.3
    """A machine that acknowledges nothing for this long is unreachable …"""

    unconfirmed_times: float = 1.5
    """… but at the earliest after this many times TCP's estimate for an acknowledgement."""

    unknown_s: float = 2.0
    """How long a node may take to answer when there is no direct connection to inspect."""

    stalled_s: float = 5.0
    """How long an agent may take to answer while its machine acknowledges data …"""

    alone_s: float = 300.0
    """… and while no other node is heard: without any node the job could only begin again."""


WINDOW = 32
SEND_TIME_S = 0.05
"""A probe is in the kernel's send buffer after this time, unless the manager itself is slow."""
EPSILON_S = 0.001
"""A remaining time below this counts as zero."""
PROBE_AGAIN_S = 1.0
"""How often an agent is probed again while its machine acknowledges: it may be cut off later."""


@dataclass(frozen=True, slots=True)
class NodeBeats:
    """The heartbeats of one node."""

    last: float
    """When it last sent a heartbeat or answered a probe."""
    pauses: tuple[float, ...] = ()
    """Recent intervals between two heartbeats."""
    asked_at: float | None = None
    """When it was probed; None: it is not late."""
    unconfirmed_at: float | None = None
    """When data was first seen to wait for an acknowledgement."""
    due: float = inf
    reported: bool = False
    """It has been reported as silent; only a heartbeat takes that back."""


@dataclass(frozen=True, slots=True)
class State:
    nodes: Mapping[NodeRank, NodeBeats] = field(default_factory=dict)

    @property
    def deadline(self) -> float:
        return min((beats.due for beats in self.nodes.values()), default=inf)


@dataclass(frozen=True, slots=True)
class BeatReceived:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class ConnectionInspected:
    node: NodeRank
    wire: TcpState | None
    """None: there is no direct connection to the node, or the kernel gives no information."""


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """The node has left or is disconnected: its silence means nothing."""

    node: NodeRank


Event = BeatReceived | ProbeAnswered | ConnectionInspected | NodeLeft | Tick


@dataclass(frozen=True, slots=True)
class ProbeNode:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class InspectConnection:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class NodeIsSilent:
    node: NodeRank
    evidence: str


@dataclass(frozen=True, slots=True)
class NodeIsBack:
    """It sends heartbeats again; pending probes can be cancelled."""

    node: NodeRank
    reported: bool
    """It was reported as silent: the job must learn that it is back."""


Command = ProbeNode | InspectConnection | NodeIsSilent | NodeIsBack


Outcome = types.Outcome[State, Command]


def step(state: State, event: Event, now: float, config: SilenceConfig) -> Outcome:
    match event:
        case Tick():
            return _deadline_passed(state, now, config)
        case NodeLeft(node):
            nodes = {n: beats for n, beats in state.nodes.items() if n != node}
            return Outcome(State(nodes))
        case BeatReceived(node):
            beats = state.nodes.get(node)
            if beats is None:
                return _put(state, node, _next_expected(now, (), config))
            suspected = beats.reported or beats.asked_at is not None
            # This pause was mistaken for silence: learn from it.
            pauses = (*beats.pauses, now - beats.last)[-WINDOW:]
            back = (NodeIsBack(node, beats.reported),) if suspected else ()
            return _put(state, node, _next_expected(now, pauses, config), *back)
        case ProbeAnswered(node):
            beats = state.nodes.get(node)
            if beats is None or beats.reported or beats.asked_at is None:
                return Outcome(state)
            return _put(state, node, _next_expected(now, beats.pauses, config))
        case ConnectionInspected(node, wire):
            beats = state.nodes.get(node)
            if beats is None or beats.reported or beats.asked_at is None:
                return Outcome(state)
            return _inspected(state, node, beats, wire, now, config)
        case _:
            assert_never(event)


def _put(state: State, node: NodeRank, beats: NodeBeats, *commands: Command) -> Outcome:
    return Outcome(State({**state.nodes, node: beats}), commands)


def _next_expected(now: float, pauses: tuple[float, ...], config: SilenceConfig) -> NodeBeats:
    late_s = max(config.late_floor_s, config.late_beats * max(pauses, default=0.0))
    if len(pauses) < config.known_beats:
        late_s = max(late_s, config.unknown_late_s)
    return NodeBeats(now, pauses, due=now + late_s)


def _deadline_passed(state: State, now: float, config: SilenceConfig) -> Outcome:
    nodes, commands = dict(state.nodes), list[Command]()
    for node, beats in state.nodes.items():
        if now < beats.due:
            continue
        if beats.asked_at is None:
            commands.append(ProbeNode(node))
            nodes[node] = replace(beats, asked_at=now, due=now + SEND_TIME_S)
        else:
            commands.append(InspectConnection(node))
            nodes[node] = replace(beats, due=inf)  # the inspection sets the next deadline
    return Outcome(State(nodes), tuple(commands))


def _inspected(
    state: State,
    node: NodeRank,
    beats: NodeBeats,
    wire: TcpState | None,
    now: float,
    config: SilenceConfig,
) -> Outcome:
    assert beats.asked_at is not None
    if wire is None:
        left_s = beats.asked_at + config.unknown_s - now
        if left_s > EPSILON_S:
            return _put(state, node, replace(beats, due=now + left_s))
        return _silent(state, node, beats, now, f"it did not answer within {config.unknown_s:g} s")
    if wire.unconfirmed:
        return _unconfirmed(state, node, beats, wire, now, config)
    is_heard = any(
        other.asked_at is None and not other.reported
        for number, other in state.nodes.items()
        if number != node
    )
    stalled_s = config.stalled_s if is_heard else max(config.stalled_s, config.alone_s)
    patience_s = max(stalled_s, 4 * max(beats.pauses, default=0.0))
    left_s = beats.asked_at + patience_s - now
    if left_s > EPSILON_S:
        confirmed = replace(beats, unconfirmed_at=None, due=now + min(left_s, PROBE_AGAIN_S))
        return _put(state, node, confirmed, ProbeNode(node))
    why = f"its machine is alive, but its agent did not answer within {patience_s:g} s"
    return _silent(state, node, beats, now, why)


def _unconfirmed(
    state: State,
    node: NodeRank,
    beats: NodeBeats,
    wire: TcpState,
    now: float,
    config: SilenceConfig,
) -> Outcome:
    # The last acknowledgement may be old because nothing was sent. What counts is how long data
    # has been waiting for one.
    since = beats.unconfirmed_at if beats.unconfirmed_at is not None else now
    waited_s = min(now - since, wire.quiet_s)
    left_s = max(config.unconfirmed_s, config.unconfirmed_times * wire.usual_s) - waited_s
    if left_s > EPSILON_S:
        return _put(state, node, replace(beats, unconfirmed_at=since, due=now + left_s))
    why = f"its machine has acknowledged nothing for {wire.quiet_s:.2f} s"
    return _silent(state, node, beats, now, why)


def _silent(state: State, node: NodeRank, beats: NodeBeats, now: float, why: str) -> Outcome:
    evidence = f"no heartbeat from node {node} for {now - beats.last:.2f} s"
    if beats.pauses:
        evidence += f" (usual interval {median(beats.pauses):.2f} s)"
    reported = replace(beats, reported=True, due=inf)
    return _put(state, node, reported, NodeIsSilent(node, f"{evidence}, and {why}"))
