from __future__ import annotations

from taskd.dashboard.carpet import GONE, JOINING, PARKED, REPAIRING, TRAINING, Carpet
from taskd.wire._pb import control_pb2 as pb


def ranks(phases: str) -> list[pb.RankStatus]:
    names = {"t": "training", "p": "parked", "d": "dead"}
    return [
        pb.RankStatus(rank=rank, node=rank // 2, phase=names[letter])
        for rank, letter in enumerate(phases)
    ]


def test_ranks_that_change_together_are_one_run() -> None:
    carpet = Carpet()
    assert carpet.see(ranks("tttt"), 100, since_ms=10) == [(10, 0, 3, TRAINING)]
    assert carpet.see(ranks("tttt"), 200) == []
    assert carpet.see(ranks("ppdp"), 300) == [
        (300, 0, 1, PARKED),
        (300, 2, 2, GONE),
        (300, 3, 3, PARKED),
    ]
    assert carpet.nodes == [(0, 1, 0), (2, 3, 1)]


def test_fast_recovery_that_no_status_has_shown_comes_from_its_report() -> None:
    carpet = Carpet()
    carpet.see(ranks("tttt"), 100)
    names = (("seen", 1000), ("stopped", 1010), ("decided", 1020), ("forked", 1030), ("step", 1100))
    report = pb.IncidentReport(
        incident=1,
        outcome="recovered",
        phases=[pb.Phase(name=name, at_unix_ms=at) for name, at in names],
        faults=[pb.IncidentFault(rank=1)],
    )
    assert carpet.add_incident(report) == [
        (1000, 1, 1, GONE),
        (1010, 0, 0, PARKED),
        (1010, 2, 3, PARKED),
        (1020, 0, 0, REPAIRING),
        (1020, 2, 3, REPAIRING),
        (1030, 1, 1, REPAIRING),
        (1100, 0, 3, TRAINING),
    ]
    assert carpet.add_incident(report) == [], "once"
    assert [run[0] for run in carpet.runs] == sorted(run[0] for run in carpet.runs)


def test_ten_thousand_ranks_that_park_are_one_run() -> None:
    carpet = Carpet()
    carpet.see(ranks("t" * 10_000), 100)
    assert carpet.see(ranks("p" * 10_000), 200) == [(200, 0, 9_999, PARKED)]


def test_job_that_grows_and_shrinks() -> None:
    carpet = Carpet()
    carpet.see(ranks("tttt"), 100)
    carpet.see(ranks("tt"), 200)
    assert carpet.see(ranks("tttt"), 300) == [(300, 2, 3, TRAINING)]


def test_rank_that_has_not_started_yet_is_not_shown_as_gone() -> None:
    carpet = Carpet()
    (run,) = carpet.see([pb.RankStatus(rank=0, phase="absent")], 5)
    assert run == (5, 0, 0, JOINING)


def test_impossible_ranks_take_no_memory() -> None:
    carpet = Carpet()
    ranks = [pb.RankStatus(rank=rank, phase="training") for rank in (2**31 - 1, -(2**31), 1, 0)]
    assert carpet.see(ranks, 1) == [(1, 0, 1, 1)]
    assert len(carpet.phases) == 2
