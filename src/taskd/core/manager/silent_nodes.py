"""Which node is silent: its beats stay away, and its machine does not answer either.

A beat that is late proves little: an agent starves on a loaded machine, a manager may have been
slow to listen. So a late node is asked, and the kernel is looked at: TCP of the other machine
confirms what we send without any help of its processes. Therefore

    beats late  ->  asked  ->  confirmed by its machine    it lives; its agent has time
                           ->  not confirmed               silent, after a fraction of a second
                           ->  not known (another's wire)  silent, after a longer while

How late is late is learnt from the node's own beats, how long a confirmation may take from TCP's
own estimate, so both grow with load and with distance. `manager/heartbeats.py` asks and looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import assert_never

from taskd.model import types
from taskd.model.bus import Wire
from taskd.model.ids import NodeRank
from taskd.model.types import Tick


@dataclass(frozen=True, kw_only=True, slots=True)
class SilenceConfig:
    late_beats: float = 1.25
    """A beat is late after this many times the longest recent pause between two …"""

    late_floor_s: float = 0.5
    """… but not before this."""

    known_beats: int = 4
    """So many beats make a node known …"""

    unknown_late_s: float = 1.0
    """… and before that a beat is late after this."""

    unconfirmed_s: float = 0.3
    """A machine that confirms nothing for this long is not reached …"""

    unconfirmed_times: float = 1.5
    """… but not before this many times what a confirmation takes at most, by TCP's estimate."""

    unknown_s: float = 2.0
    """How long a node may take to answer where its machine cannot be seen."""

    stalled_s: float = 5.0
    """How long an agent may take to answer whose machine confirms what it is sent."""


WINDOW = 32
SENT_S = 0.05
"""What is sent now is in the kernel's hands after so long, unless we are slow ourselves."""
MOMENT_S = 0.001
"""Less than this is not worth another look."""
AGAIN_S = 1.0
"""How often an agent is asked again whose machine confirms: it may be cut off meanwhile."""


@dataclass(frozen=True, slots=True)
class NodeBeats:
    """The beats of one node."""

    last: float
    """The last sign of life."""
    pauses: tuple[float, ...] = ()
    asked_at: float | None = None
    unconfirmed_at: float | None = None
    """When it was first seen that something waits for its machine's confirmation."""
    due: float = inf
    told: bool = False
    """It has been called silent; only a beat takes that back."""


@dataclass(frozen=True, slots=True)
class State:
    nodes: Mapping[NodeRank, NodeBeats] = field(default_factory=dict)

    @property
    def deadline(self) -> float:
        return min((pulse.due for pulse in self.nodes.values()), default=inf)


@dataclass(frozen=True, slots=True)
class BeatReceived:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class ConnectionInspected:
    node: NodeRank
    wire: Wire | None
    """None: between us and the node is somebody else, or nothing that the kernel knows of."""


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """The node has left, or its link is broken: its silence is no news."""

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
    """It beats again; nobody need wait for its answer."""

    node: NodeRank


Command = ProbeNode | InspectConnection | NodeIsSilent | NodeIsBack


Outcome = types.Outcome[State, Command]


def step(state: State, event: Event, now: float, config: SilenceConfig) -> Outcome:
    match event:
        case Tick():
            return _late(state, now, config)
        case NodeLeft(node):
            nodes = {n: pulse for n, pulse in state.nodes.items() if n != node}
            return Outcome(State(nodes))
        case BeatReceived(node):
            pulse = state.nodes.get(node)
            if pulse is None:
                return _put(state, node, _waiting(now, (), config))
            doubted = pulse.told or pulse.asked_at is not None
            # A pause that was taken for silence was none: learn from it.
            pauses = (*pulse.pauses, now - pulse.last)[-WINDOW:]
            return _put(state, node, _waiting(now, pauses, config), *[NodeIsBack(node)] * doubted)
        case ProbeAnswered(node):
            pulse = state.nodes.get(node)
            if pulse is None or pulse.told or pulse.asked_at is None:
                return Outcome(state)
            return _put(state, node, _waiting(now, pulse.pauses, config))
        case ConnectionInspected(node, wire):
            pulse = state.nodes.get(node)
            if pulse is None or pulse.told or pulse.asked_at is None:
                return Outcome(state)
            return _looked(state, node, pulse, wire, now, config)
        case _:
            assert_never(event)


def _put(state: State, node: NodeRank, pulse: NodeBeats, *commands: Command) -> Outcome:
    return Outcome(State({**state.nodes, node: pulse}), commands)


def _waiting(now: float, pauses: tuple[float, ...], config: SilenceConfig) -> NodeBeats:
    late_s = max(config.late_floor_s, config.late_beats * max(pauses, default=0.0))
    if len(pauses) < config.known_beats:
        late_s = max(late_s, config.unknown_late_s)
    return NodeBeats(now, pauses, due=now + late_s)


def _late(state: State, now: float, config: SilenceConfig) -> Outcome:
    nodes, commands = dict(state.nodes), list[Command]()
    for node, pulse in state.nodes.items():
        if now < pulse.due:
            continue
        if pulse.asked_at is None:
            commands.append(ProbeNode(node))
            nodes[node] = replace(pulse, asked_at=now, due=now + SENT_S)
        else:
            commands.append(InspectConnection(node))
            nodes[node] = replace(pulse, due=inf)  # what is seen there sets the next
    return Outcome(State(nodes), tuple(commands))


def _looked(
    state: State,
    node: NodeRank,
    pulse: NodeBeats,
    wire: Wire | None,
    now: float,
    config: SilenceConfig,
) -> Outcome:
    assert pulse.asked_at is not None
    if wire is None:
        left_s = pulse.asked_at + config.unknown_s - now
        if left_s > MOMENT_S:
            return _put(state, node, replace(pulse, due=now + left_s))
        return _silent(state, node, pulse, now, f"no answer came in {config.unknown_s:g} s")
    if wire.unconfirmed:
        return _unconfirmed(state, node, pulse, wire, now, config)
    patience_s = max(config.stalled_s, 4 * max(pulse.pauses, default=0.0))
    left_s = pulse.asked_at + patience_s - now
    if left_s > MOMENT_S:
        confirmed = replace(pulse, unconfirmed_at=None, due=now + min(left_s, AGAIN_S))
        return _put(state, node, confirmed, ProbeNode(node))
    why = f"its machine lives, but no answer came in {patience_s:g} s"
    return _silent(state, node, pulse, now, why)


def _unconfirmed(
    state: State, node: NodeRank, pulse: NodeBeats, wire: Wire, now: float, config: SilenceConfig
) -> Outcome:
    # The last confirmation may be long ago because nothing was sent; what counts is how long
    # something has been waiting for one.
    since = pulse.unconfirmed_at if pulse.unconfirmed_at is not None else now
    waited_s = min(now - since, wire.quiet_s)
    left_s = max(config.unconfirmed_s, config.unconfirmed_times * wire.usual_s) - waited_s
    if left_s > MOMENT_S:
        return _put(state, node, replace(pulse, unconfirmed_at=since, due=now + left_s))
    why = f"its machine has confirmed nothing for {wire.quiet_s:.2f} s"
    return _silent(state, node, pulse, now, why)


def _silent(state: State, node: NodeRank, pulse: NodeBeats, now: float, why: str) -> Outcome:
    told = f"no beat of node {node} for {now - pulse.last:.2f} s"
    if pulse.pauses:
        told += f", where one comes every {median(pulse.pauses):.2f} s"
    told_once = replace(pulse, told=True, due=inf)
    return _put(state, node, told_once, NodeIsSilent(node, f"{told}, and {why}"))
