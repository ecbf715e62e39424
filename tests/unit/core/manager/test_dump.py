"""Which ranks write the emergency checkpoint of a job without replicas."""

from __future__ import annotations

from taskd.core.manager.states import Dumping
from taskd.model import messages as m
from taskd.model.clusterd import StrategiesReport
from taskd.model.ids import Incarnation, NodeRank, Rank, Step, worker
from tests.unit.core.manager.test_machine import ASK, STOP, Play, change

SHARDS = "abcd"


def sharded() -> Play:
    """Rank 3 is lost. Each rank holds a different shard."""
    play = Play().training()
    for rank, shard in enumerate(SHARDS):
        node, incident = NodeRank(rank // 2), play.state.job.incident
        hello = m.WorkerHello(
            Rank(rank), node, Incarnation(0), 1, incident, Step(7), "training", True, shard
        )
        play.receive(worker(node, rank), hello)
    return play.dies(3).orders(STOP)


def parks(play: Play, rank: int, step: int, *copies: tuple[str, int]) -> Play:
    held = tuple(m.Copy(shard, Step(at)) for shard, at in copies)
    incident = play.state.job.incident
    parked = m.Parked(Rank(rank), Incarnation(0), incident, Step(step), True, copies=held)
    return play.receive(worker(rank // 2, rank), parked)


def test_rank_at_another_step_writes_the_copies_it_holds() -> None:
    play = sharded()
    parks(play, 0, 7, ("c", 7))
    parks(play, 1, 7, ("c", 7))
    parks(play, 2, 8, ("d", 7))
    assert "dump" in play.orders(ASK).sent(StrategiesReport)[0].strategies
    play.orders(change("dump"))
    assert isinstance(play.state, Dumping)
    [dump] = play.sent(m.Dump)
    assert (dump.step, [member.rank for member in dump.members]) == (7, [0, 1, 2])


def test_dump_is_impossible_when_a_shard_has_no_copy() -> None:
    play = sharded()
    for rank in range(3):
        parks(play, rank, 7)
    assert "dump" not in play.orders(ASK).sent(StrategiesReport)[0].strategies
