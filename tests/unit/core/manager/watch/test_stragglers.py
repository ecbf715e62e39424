"""Which rank is a straggler: single judgements."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager.watch.stragglers import (
    Accuse,
    Cause,
    Clear,
    JobDisturbed,
    Outcome,
    PacesReported,
    State,
    Straggler,
    StragglerConfig,
    step,
)
from taskd.model.ids import Incarnation, Rank
from taskd.model.profiling import EVERYTHING, NOTHING, Pace, PeerConnection

CONFIG = StragglerConfig(window_s=10.0, least_steps=5)


def cleared(outcome: Outcome) -> list[Straggler]:
    return [c.straggler for c in outcome.commands if isinstance(c, Clear)]


class Job:
    """Four ranks that report their pace once per second; each step takes half a second."""

    def __init__(self, config: StragglerConfig = CONFIG, every_s: float = 1.0) -> None:
        self.config, self.every_s = config, every_s
        self.state, self.now = State(), 1_000.0
        self.paces = {rank: Pace(Rank(rank), Incarnation(0), EVERYTHING) for rank in range(4)}
        self.found: list[Straggler] = []
        self.cleared: list[Straggler] = []

    def report(self, paces: tuple[Pace, ...]) -> Outcome:
        outcome = step(self.state, PacesReported(paces), self.now, self.config)
        self.state = outcome.state
        self.found += [c.straggler for c in outcome.commands if isinstance(c, Accuse)]
        self.cleared += cleared(outcome)
        return outcome

    def run(
        self,
        seconds: int,
        wait: dict[int, float] | None = None,
        data: dict[int, float] | None = None,
        busy: dict[int, float] | None = None,
        save: dict[int, float] | None = None,
    ) -> None:
        """All times per step; a rank that is not named waits 0.2 s of its 0.5 s."""
        for _ in range(round(seconds / self.every_s)):
            self.now += self.every_s
            steps = 2 * self.every_s
            for rank, before in self.paces.items():
                sent, sending_s = 0, 0.0
                if before.wires:
                    sent, sending_s = before.wires[0].sent_bytes, before.wires[0].busy_s
                wire = PeerConnection(
                    f"h{rank}:1",
                    f"h{(rank + 1) % 4}:1",
                    sent + 2_000_000,
                    sending_s + steps * (busy or {}).get(rank, 0.02),
                )
                self.paces[rank] = replace(
                    before,
                    steps=before.steps + int(steps),
                    total_s=before.total_s + steps * 0.5,
                    wait_s=before.wait_s + steps * (wait or {}).get(rank, 0.2),
                    data_s=before.data_s + steps * (data or {}).get(rank, 0.01),
                    save_s=before.save_s + steps * (save or {}).get(rank, 0.0),
                    wires=(wire,),
                )
            self.report(tuple(self.paces.values()))


def test_balanced_job_has_no_stragglers() -> None:
    job = Job()
    job.run(60)
    assert job.state.slow == {}
    assert not job.found


def test_rank_with_the_shortest_wait_is_the_straggler() -> None:
    job = Job()
    job.run(30, wait={2: 0.05})
    (slow,) = job.found
    assert (slow.rank, slow.cause) == (2, Cause.COMPUTE)
    assert round(slow.late_s, 3) == 0.15
    assert "rank 2 enters the collectives last" in slow.evidence
    assert "150.0 ms" in slow.evidence


def test_slow_data_loading_and_slow_compute_are_distinguished() -> None:
    job = Job()
    job.run(30, wait={1: 0.05}, data={1: 0.16})
    assert [(slow.rank, slow.cause) for slow in job.found] == [(1, Cause.DATA)]


def test_slow_sender_is_found_when_own_times_are_equal() -> None:
    job = Job()
    job.run(30, busy={3: 0.18})
    (slow,) = job.found
    assert (slow.rank, slow.cause) == (3, Cause.NETWORK)
    assert "rank 3 sends to rank 0" in slow.evidence


def test_rank_with_slow_connections_in_both_directions_is_named() -> None:
    job = Job()
    job.run(30, busy={0: 0.2, 1: 0.18})  # 0 sends to 1, 1 sends to 2
    assert [(slow.rank, slow.cause) for slow in job.found] == [(1, Cause.NETWORK)]


def test_saving_a_checkpoint_makes_no_straggler() -> None:
    job = Job()
    job.run(30, wait={0: 0.02}, save={0: 0.18})
    assert not job.found


def test_single_long_pause_makes_no_straggler() -> None:
    job = Job()
    job.run(12)
    job.run(4, wait={1: 0.0})
    job.run(12)
    assert not job.found


def test_straggler_has_the_time_since_when_it_is_slow() -> None:
    job = Job()
    job.run(20)
    began = job.now
    job.run(12, wait={2: 0.05})
    (slow,) = job.state.slow.values()
    assert abs(slow.since - began) <= 2.0
    job.run(30, wait={2: 0.05})
    assert job.state.slow[Rank(2)].since == slow.since
    assert len(job.found) == 1, "said once"


def test_straggler_that_recovers_is_cleared() -> None:
    job = Job()
    job.run(20, wait={2: 0.05})
    job.run(20)
    assert job.state.slow == {}
    assert [slow.rank for slow in job.cleared] == [2]


def test_straggler_that_is_only_a_little_faster_is_not_cleared() -> None:
    job = Job()
    job.run(20, wait={2: 0.05})
    job.run(20, wait={2: 0.165})
    assert list(job.state.slow) == [2]


def test_rank_below_the_threshold_is_no_straggler() -> None:
    job = Job()
    job.run(40, wait={2: 0.17})
    assert not job.found
    strict = Job(replace(CONFIG, slower=0.03))
    strict.run(40, wait={2: 0.17})
    assert [slow.rank for slow in strict.found] == [2]


def test_interrupted_job_is_measured_again() -> None:
    job = Job()
    job.run(11)
    outcome = step(job.state, JobDisturbed(), job.now, CONFIG)
    assert outcome.state.samples == {}


def test_new_incarnation_starts_a_new_series() -> None:
    """Found in a real run: the first pace of a rank has no predecessor."""
    job = Job()
    job.run(20, wait={2: 0.05})
    reborn = replace(job.paces[2], incarnation=Incarnation(1), steps=0, total_s=0.0, wait_s=0.0)
    job.now += 0.01
    outcome = job.report((reborn,))
    assert len(outcome.state.samples[Rank(2)]) == 1
    again = replace(job.paces[1], steps=0, total_s=0.0, wait_s=0.0)
    job.report((again,))


def test_window_is_extended_until_it_has_enough_steps() -> None:
    """Found in a real run: the series was cut to fewer samples than a judgement needs."""
    job = Job(replace(CONFIG, window_s=2.0))
    job.run(20, wait={2: 0.05})
    assert [slow.rank for slow in job.found] == [2]


def test_number_of_samples_is_bounded() -> None:
    job = Job(every_s=0.5)
    job.config = replace(CONFIG, window_s=100.0)
    job.run(400)
    assert all(len(series) <= 60 for series in job.state.samples.values())


def test_single_rank_is_never_a_straggler() -> None:
    job = Job()
    job.paces = {0: job.paces[0]}
    job.run(30, wait={0: 0.0})
    assert not job.found


def test_straggler_that_is_not_recorded_any_more_is_cleared() -> None:
    job = Job()
    job.run(20, wait={1: 0.05, 2: 0.05})
    accused = set(job.state.slow)
    assert accused
    off = tuple(Pace(rank, Incarnation(0), NOTHING) for rank in map(Rank, range(4)))
    outcome = job.report(off)
    assert {slow.rank for slow in cleared(outcome)} == accused
    assert outcome.because
    assert outcome.state.slow == {}
    assert outcome.state.samples == {}
    assert not cleared(job.report(off)), "said once"


def test_rank_that_is_not_recorded_does_not_affect_the_others() -> None:
    job = Job()
    job.run(20, wait={2: 0.05})
    job.report((replace(job.paces.pop(0), recorded=NOTHING),))
    assert list(job.state.slow) == [2]
    job.run(20)
    assert job.state.slow == {}
