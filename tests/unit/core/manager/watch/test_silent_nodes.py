"""When a node is silent: in under a second if it is cut off, never because it is loaded."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

import pytest

from taskd.core.manager.watch.silent_nodes import (
    BeatReceived,
    ConnectionInspected,
    Event,
    InspectConnection,
    NodeIsBack,
    NodeIsSilent,
    NodeLeft,
    ProbeAnswered,
    ProbeNode,
    SilenceConfig,
    State,
    step,
)
from taskd.model.bus import TcpState
from taskd.model.ids import NodeRank
from taskd.model.types import Tick

CONFIG = SilenceConfig()
NODE = NodeRank(1)
BEAT_S = 0.4
CONFIRMED = TcpState(False, 0.01, 0.2)


class Watch:
    def __init__(
        self, beats: int = 12, pause_s: float = BEAT_S, config: SilenceConfig = CONFIG
    ) -> None:
        self.state, self.now, self.config = State(), 100.0, config
        for _ in range(beats):
            self.now += pause_s
            assert self.take(BeatReceived(NODE)) == ()

    def take(self, event: Event) -> tuple[object, ...]:
        outcome = step(self.state, event, self.now, self.config)
        self.state = outcome.state
        return outcome.commands

    def on(self) -> tuple[object, ...]:
        """Advance to the next deadline."""
        self.now = self.state.deadline
        return self.take(Tick())


def test_late_node_is_probed_and_silent_if_its_machine_does_not_acknowledge() -> None:
    watch = Watch()
    began = watch.now
    assert watch.on() == (ProbeNode(NODE),)
    assert watch.on() == (InspectConnection(NODE),)
    assert watch.take(ConnectionInspected(NODE, TcpState(True, watch.now - began, 0.2))) == ()
    assert watch.on() == (InspectConnection(NODE),)
    (silent,) = watch.take(ConnectionInspected(NODE, TcpState(True, watch.now - began, 0.2)))
    assert isinstance(silent, NodeIsSilent)
    assert "its machine has acknowledged nothing" in silent.evidence
    assert watch.now - began < 1.0
    assert watch.state.deadline == inf
    assert watch.take(BeatReceived(NODE)) == (NodeIsBack(NODE, reported=True),)


def test_starved_agent_has_time_while_its_machine_acknowledges() -> None:
    watch = Watch()
    began = watch.now
    assert watch.on() == (ProbeNode(NODE),)
    while watch.now - began < 4.0:
        assert watch.on() == (InspectConnection(NODE),)
        assert watch.take(ConnectionInspected(NODE, CONFIRMED)) == (ProbeNode(NODE),), (
            "it is probed again"
        )
    assert watch.take(ProbeAnswered(NODE)) == ()
    assert watch.on() == (ProbeNode(NODE),), "an answer does not replace a heartbeat"


def when_silent(watch: Watch, other: NodeRank | None = None) -> float:
    """After what time the node is silent while its machine acknowledges. `other` is heard."""
    began = watch.now
    found: tuple[object, ...] = ()
    while not found or not isinstance(found[0], NodeIsSilent):
        if other is not None:
            watch.take(BeatReceived(other))
        watch.on()
        found = watch.take(ConnectionInspected(NODE, CONFIRMED))
    assert "its machine is alive" in found[0].evidence
    return watch.now - began


def test_agent_that_never_answers_is_silent_although_its_machine_is_alive() -> None:
    assert when_silent(Watch(), other=NodeRank(2)) < 2 * CONFIG.stalled_s


def test_stopped_agent_of_the_only_node_has_minutes() -> None:
    assert when_silent(Watch()) >= CONFIG.alone_s


def test_agents_that_starve_together_have_minutes() -> None:
    """All machines are alive and very busy. Without any node the job would begin again."""
    watch = Watch()
    watch.take(BeatReceived(NodeRank(2)))
    assert when_silent(watch) >= CONFIG.alone_s


def test_answer_may_take_longer_without_a_direct_connection() -> None:
    watch = Watch()
    began = watch.now
    watch.on()
    watch.on()
    assert watch.take(ConnectionInspected(NODE, None)) == ()
    watch.on()
    (silent,) = watch.take(ConnectionInspected(NODE, None))
    assert isinstance(silent, NodeIsSilent)
    assert watch.now - began >= CONFIG.unknown_s


def test_data_sent_just_now_proves_nothing_yet() -> None:
    """The manager itself may have been so slow that the probe was sent only now."""
    watch = Watch()
    watch.on()
    watch.now += 3.0
    assert watch.take(Tick()) == (InspectConnection(NODE),)
    assert watch.take(ConnectionInspected(NODE, TcpState(True, 3.4, 0.2))) == ()


def test_slow_network_gets_more_time() -> None:
    watch = Watch()
    watch.on()
    watch.on()
    watch.take(ConnectionInspected(NODE, TcpState(True, 0.6, 0.8)))
    assert watch.state.deadline == pytest.approx(watch.now + 1.2)
    loaded = Watch()
    loaded.now += 0.8
    loaded.take(BeatReceived(NODE))
    assert loaded.state.deadline == pytest.approx(loaded.now + 1.0)


def test_node_that_left_is_not_judged() -> None:
    watch = Watch()
    watch.take(NodeLeft(NODE))
    assert watch.state.deadline == inf


def test_new_node_has_more_time() -> None:
    for beats, late_s in ((1, 1.0), (4, 1.0), (5, 0.5)):
        watch = Watch(beats)
        assert watch.state.deadline == pytest.approx(watch.now + late_s)


# Simulation of a node and a network


@dataclass
class World:
    """One node with an agent that starves, a network that drops packets, and the machine.

    A packet is lost with some chance and repeated after 0.2 s, 0.4 s and so on, as TCP does.
    """

    random: Random
    stall_chance: float = 0.0
    """The probability that the agent does not run, for up to seconds, at any of its turns."""
    loss: float = 0.0
    delay_s: float = 0.0005
    cut_at: float = inf
    now: float = 0.0
    state: State = field(default_factory=State)
    heap: list[tuple[float, int, Event | str]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)
    sent: list[tuple[float, float]] = field(default_factory=list)
    """When data was sent to the node, and when it will be acknowledged."""
    last_confirmed: float = 0.0
    silent_at: float | None = None
    asked: int = 0
    timer: float = inf

    def plan(self, at: float, event: Event | str) -> None:
        heapq.heappush(self.heap, (at, next(self.numbers), event))

    def travel(self, at: float) -> float:
        """When a packet that is sent at this time arrives."""
        wait_s = 0.2
        while self.random.random() < self.loss:
            at, wait_s = at + wait_s, 2 * wait_s
        at += self.delay_s * self.random.uniform(1, 3)
        return at if at < self.cut_at else inf

    def stall_s(self) -> float:
        if self.random.random() >= self.stall_chance:
            return self.random.uniform(0, 0.005)
        return min(4.0, 0.05 * self.random.paretovariate(0.8))

    def run(self, until: float) -> None:
        self.plan(0.0, "agent")
        while self.heap and self.now < until and self.silent_at is None:
            self.now, _, what = heapq.heappop(self.heap)
            if what == "agent":
                self.plan(self.now + BEAT_S + self.stall_s(), "agent")
                if (arrival := self.travel(self.now)) < inf:
                    self.plan(arrival, BeatReceived(NODE))
            elif isinstance(what, BeatReceived | ProbeAnswered | Tick):
                if isinstance(what, BeatReceived):
                    self.last_confirmed = self.now
                if isinstance(what, Tick):
                    self.timer = inf
                self.take(what)

    def take(self, event: Event) -> None:
        outcome = step(self.state, event, self.now, CONFIG)
        self.state = outcome.state
        for command in outcome.commands:
            match command:
                case ProbeNode():
                    self.asked += 1
                    self.ask()
                case InspectConnection():
                    self.take(ConnectionInspected(NODE, self.wire()))
                case NodeIsSilent():
                    self.silent_at = self.now
                case NodeIsBack():
                    pass
        if self.state.deadline < self.timer:
            self.timer = self.state.deadline
            self.plan(self.timer, Tick())

    def ask(self) -> None:
        there = self.travel(self.now)
        confirmed = self.travel(there) if there < inf else inf
        self.sent.append((self.now, confirmed))
        if there < inf and (back := self.travel(there + self.stall_s())) < inf:
            self.plan(back, ProbeAnswered(NODE))

    def wire(self) -> TcpState:
        came = [at for _, at in self.sent if at <= self.now]
        self.sent = [pair for pair in self.sent if pair[1] > self.now]
        self.last_confirmed = max([self.last_confirmed, *came])
        return TcpState(bool(self.sent), self.now - self.last_confirmed, max(0.2, 6 * self.delay_s))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("stall_chance", "loss", "delay_s"),
    [(0.0, 0.0, 0.0005), (0.05, 0.0, 0.0005), (0.3, 0.0, 0.002), (0.05, 0.02, 0.001), (0, 0, 0.1)],
    ids=["quiet", "loaded", "starved", "lossy", "far"],
)
def test_slow_node_is_never_silent(
    seed: int, stall_chance: float, loss: float, delay_s: float
) -> None:
    world = World(Random(seed), stall_chance, loss, delay_s)
    world.run(until=400.0)
    assert world.silent_at is None


@pytest.mark.parametrize("seed", range(20))
def test_cut_is_detected_within_a_second_on_an_idle_network(seed: int) -> None:
    random = Random(seed)
    world = World(random, cut_at=random.uniform(20.0, 60.0))
    world.run(until=100.0)
    assert world.silent_at is not None
    assert world.silent_at - world.cut_at < 1.0
    assert world.asked == 1, "the node was not probed before"


@pytest.mark.parametrize("seed", range(20))
def test_cut_is_detected_under_load(seed: int) -> None:
    world = World(Random(seed), stall_chance=0.05, loss=0.02, cut_at=60.0)
    world.run(until=200.0)
    assert world.silent_at is not None
    assert 0 < world.silent_at - world.cut_at < 8.0
