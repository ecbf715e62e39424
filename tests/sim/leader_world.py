"""Managers that lead one job in turn, with etcd as a model: who gives orders, and which are obeyed.

Time is virtual. Candidates stop, wake, die and are cut off from etcd; their messages are late.
The agents are reached by every process that believes to lead. What must never happen: an agent
obeys an older leader after it has answered a newer one, or two leaders act at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from taskd.core.election import Candidacy, Claim, Fence, Tenure, Term, TermsSeen

LENGTH_S, PERIOD_S, ANSWER_S = 3.0, 0.5, 0.2
BUGS = ("no fence", "no clock", "epoch reused", "claims without comparing")


@dataclass
class Etcd:
    """One linearizable store with one lease."""

    term: Term | None = None
    epoch: int = 0
    expires: float = 0.0

    def look(self, now: float) -> TermsSeen:
        if self.term is not None and now >= self.expires:
            self.term = None
        return TermsSeen(self.term, self.epoch, 0)


@dataclass
class Order:
    epoch: int
    term: int
    """Which term it really comes from: the truth, which no process sees."""
    arrives: float
    agent: int
    is_hello: bool
    """The new leader asks for a hello. It decides only about agents that have answered."""


@dataclass
class Manager:
    node: int
    candidacy: Candidacy
    tenure: Tenure = field(default_factory=Tenure)
    runs_at: float = 0.0
    """When it acts next; later than now while it is stopped."""
    cut: bool = False
    term: int = 0
    heard: set[int] = field(default_factory=set)
    claimed: Claim | None = None
    """It has read etcd and will write next."""


class World:
    def __init__(self, seed: int, bug: str = "") -> None:
        self.random, self.bug, self.now = Random(seed), bug, 0.0
        self.etcd = Etcd()
        self.managers = [Manager(node, Candidacy(node)) for node in range(3)]
        self.fences = [Fence() for _ in range(3)]
        self.answered = [0] * 3
        """The newest term that each agent has answered."""
        self.orders: list[Order] = []
        self.obeyed = 0
        self.terms = 0
        self.stale = 0
        """Orders of former leaders that were refused: without any, the test would prove nothing."""

    def run(self, steps: int = 400) -> None:
        for _ in range(steps):
            self.now += self.random.expovariate(8.0)
            self._disturb()
            for manager in self.managers:
                if manager.runs_at <= self.now:
                    self._act(manager)
            self._deliver()
            self._check_one_leader()

    def _disturb(self) -> None:
        chance, manager = self.random.random(), self.random.choice(self.managers)
        if chance < 0.02:
            manager.runs_at = self.now + self.random.uniform(0.5, 3 * LENGTH_S)
        elif chance < 0.03:
            manager.cut = not manager.cut
        elif chance < 0.04:  # killed and started again; its liveness port proves its death
            number = self.managers.index(manager)
            if self.etcd.term is not None and self.etcd.term.node == manager.node:
                self.etcd.term = None
            self.managers[number] = Manager(
                manager.node, Candidacy(manager.node), runs_at=self.now + 1.0
            )

    def _act(self, manager: Manager) -> None:
        if manager.tenure.holds(self.now) or (self.bug == "no clock" and manager.tenure.epoch):
            self._lead(manager)
        elif manager.tenure.epoch is not None:
            manager.tenure.end()
        elif not manager.cut:
            self._campaign(manager)
        manager.runs_at = self.now + self.random.uniform(0.1, PERIOD_S)

    def _campaign(self, manager: Manager) -> None:
        seen = self.etcd.look(self.now)
        if manager.claimed is None:
            decision = manager.candidacy.consider(seen)
            manager.claimed = decision if isinstance(decision, Claim) else None
            return
        claim, manager.claimed = manager.claimed, None
        compares = self.bug != "claims without comparing"
        if compares and (seen.term is not None or seen.epoch != claim.epoch - 1):
            return
        epoch = seen.epoch if self.bug == "epoch reused" and seen.epoch else claim.epoch
        self.etcd.term, self.etcd.epoch = Term(epoch, manager.node, "", ""), epoch
        self.etcd.expires = self.now + LENGTH_S
        manager.tenure.begin(epoch, self.now, LENGTH_S)
        manager.heard.clear()
        self.terms += 1
        manager.term = self.terms

    def _lead(self, manager: Manager) -> None:
        epoch = manager.tenure.epoch
        assert epoch is not None
        if not manager.cut:
            term = self.etcd.look(self.now).term
            if term is None or term.node != manager.node or term.epoch != epoch:
                if self.bug != "no clock":
                    manager.tenure.end()
                    return
            else:
                self.etcd.expires = self.now + LENGTH_S
                manager.tenure.renewed(self.now, LENGTH_S)
        for agent in range(3):
            late = self.random.choice([0.0, ANSWER_S, 2 * LENGTH_S])
            is_hello = agent not in manager.heard
            self.orders.append(Order(epoch, manager.term, self.now + late, agent, is_hello))

    def _deliver(self) -> None:
        due = [order for order in self.orders if order.arrives <= self.now]
        self.orders = [order for order in self.orders if order.arrives > self.now]
        self.random.shuffle(due)
        for order in due:
            fence = self.fences[order.agent]
            if not fence.admits(order.epoch) and self.bug != "no fence":
                self.stale += 1
                continue
            if order.is_hello:
                self.answered[order.agent] = max(self.answered[order.agent], order.term)
                for manager in self.managers:
                    if manager.term == order.term:
                        manager.heard.add(order.agent)
                continue
            assert order.term >= self.answered[order.agent], (
                f"an order of term {order.term} is obeyed after term "
                f"{self.answered[order.agent]} was answered"
            )
            self.obeyed += 1

    def _check_one_leader(self) -> None:
        leading = [one for one in self.managers if one.tenure.holds(self.now)]
        if self.bug == "no clock":
            leading = [one for one in self.managers if one.tenure.epoch is not None]
        epochs = [one.tenure.epoch for one in leading]
        assert len(leading) <= 1, f"two managers act at the same time, with epochs {epochs}"
