"""Every interleaving of events for one rank: one that trains, and one that joins."""

from __future__ import annotations

from taskd.core.worker import states
from taskd.core.worker.states import State
from taskd.model.ids import Incident
from tests.sim.worker_world import ME, World, explore


def test_every_interleaving_is_safe_and_every_legal_edge_is_taken() -> None:
    trains = explore(World(states.Training(ME, Incident(0))), incidents=3)
    joins = explore(World(states.Joining(ME, Incident(0)), thread="leaving"), incidents=3)
    assert trains.worlds > 500
    walked = trains.edges | joins.edges
    drawn: set[tuple[type[State], type[State]]] = {
        (before, after) for before, all_after in states.LEGAL.items() for after in all_after
    }
    assert walked == {(a, b) for a, b in drawn if a is not b}
