"""What is written to the journal is read back unchanged, for every state of a job."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from taskd.clusterd.records import journal_records as records
from taskd.clusterd.records.journal_records import PastRound, Record
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.machine import step
from taskd.core.clusterd.states import Outcome, State
from taskd.model import clusterd as m
from taskd.model.faults import Fault, FaultKind, SeenFault
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.operations import NicResult, OpResult, StressResult
from taskd.model.strategies import LADDER
from taskd.model.types import Tick
from taskd.wire.tagged_json import UnreadableRecord

JOB = JobId("job")
CONFIG = RecoveryConfig(flush_s=1.0, convergence_s=1.0, pickup_s=1.0)
WORDS = ("retry", "recover", "downgrade", "upgrade", "dump", "exit", "continue", "migration")


def pods(chance: random.Random) -> tuple[m.Pod, ...]:
    return tuple(
        m.Pod(
            NodeRank(node),
            f"pod-{node}-{chance.randrange(3)}",
            f"pod{node}",
            f"host{node}",
            (Rank(2 * node), Rank(2 * node + 1)),
            ("0", "1"),
            backup=chance.random() < 0.2,
        )
        for node in range(3)
    )


def event(chance: random.Random, state: State) -> m.Event:
    """Mostly events that the state expects, sometimes any event."""
    order = getattr(state, "order", None)
    word = order.strategy if order is not None and chance.random() < 0.7 else chance.choice(WORDS)
    rank = Rank(chance.randrange(6))
    levels = ("SubHealthFault", "SeparateNPU", "RestartBusiness")
    code = chance.choice([0, 0, 0, 201, 404, 405, 406, 407, 499])
    likely: list[m.Event] = [
        m.FaultReport((Fault(rank, chance.choice(list(FaultKind)), evidence="seen"),)),
        m.FaultsSeen((SeenFault(rank, "80E01801", chance.choice(levels), "pod-1-0"),)),
        m.FaultsSeen(()),
        m.PodsSeen(pods(chance), chance.choice(["Running", "Pending"])),
        m.PlatformSeen(chance.choice(["", *WORDS]), result="3:1", rank_table="true"),
        m.StopReport(code),
        m.StopReport(0),
        m.StrategiesReport(WORDS),
        m.ResultReport(code, word, (rank,)),
        m.ResultReport(0, word),
        m.Subscribed(),
        m.Unsubscribed(),
        m.SignalDelivered(state.job.sequence),
        m.OperatorAskedNic((rank,), (True,)),
        m.OperatorAskedStress({rank: (0, 1)}),
        NicResult(chance.random() < 0.5),
        StressResult({rank: {"0": OpResult(chance.choice("01234"))}}),
        m.ClusterWriteDone(state.job.sequence),
        m.ClusterWriteFailed(state.job.sequence, "no"),
        Tick(),
    ]
    return chance.choice(likely)


def walk(seed: int) -> list[tuple[Record, Record, m.Event, Outcome]]:
    chance = random.Random(seed)
    config = m.JobConfig(
        strategies=LADDER,
        cluster=chance.random() < 0.7,
        platform=chance.random() < 0.3,
        sub_health=chance.choice(["ignore", "hotSwitch"]),
        super_pod=chance.random() < 0.3,
    )
    record, now, outcome = records.first(JOB), 0.0, []
    happened: m.Event = m.JobRegistered(JOB, config, "seed", "name")
    for _ in range(150):
        made = step(record.state, happened, now, CONFIG)
        ordered = tuple(c for c in made.commands if isinstance(c, m.ClusterCommand))
        past = PastRound(1, 0.0, 0.5, "retry", "worked", (Fault(Rank(1)),))
        after = Record(made.state, ordered, (past,) if chance.random() < 0.5 else record.rounds)
        outcome.append((record, after, happened, made))
        record = after
        now = max(now, min(record.state.deadline, now + chance.choice([0.0, 0.1, 100.0])))
        happened = event(chance, record.state)
    return outcome


@pytest.mark.parametrize("seed", range(25))
def test_every_state_of_a_random_walk_is_restored(seed: int) -> None:
    notes: dict[str, str] = {}
    for before, after, happened, made in walk(seed):
        written = records.write(JOB, before, after, happened, made, 0.0)
        for name, text in written.notes:
            assert text is not None
            notes[name] = text
        assert records.read(JOB, written.record, notes) == after
        assert written.entries[0].because == made.because
        assert len(written.record) < 20_000


def test_random_walks_cover_many_states() -> None:
    seen = {type(after.state).__name__ for seed in range(25) for _, after, _, _ in walk(seed)}
    assert len(seen) >= 15, sorted(seen)


def test_notes_are_deleted_with_the_job() -> None:
    record = records.first(JOB)
    outcome = step(record.state, m.JobDeleted(), 0.0, CONFIG)
    written = records.write(JOB, record, Record(outcome.state), m.JobDeleted(), outcome, 0.0)
    assert written.ended
    assert {text for _, text in written.notes} == {None}


def test_a_record_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(UnreadableRecord, match="Dreaming"):
        records.read(JOB, '{"~":"Record","state":{"~":"Dreaming"}}', {})


def test_history_entry_fits_on_one_line() -> None:
    many = m.FaultReport(tuple(Fault(Rank(n), evidence="x") for n in range(1000)))
    assert "… 1000 in all" in records.describe(many)
    assert len(records.describe(many)) < 500
    signal = m.Signal(uuid="u", incident=Incident(0), type="stopTrain")
    assert records.describe(replace(signal, sequence=3)).endswith("type=stopTrain, sequence=3)")
