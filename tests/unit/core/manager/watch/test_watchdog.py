"""Which ranks are named as hung, when the job is stalled, and when neither is so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from taskd.core.manager.watch.wait_bounds import PHASES, LivenessConfig
from taskd.core.manager.watch.watchdog import AGAIN_S, Command, Hung, Stalled, State, Warned, step
from taskd.model.ids import Incarnation, NodeRank, Rank, Step
from taskd.model.messages import NodeHeartbeat, Progress

CONFIG = LivenessConfig()
STEP_S, BEAT_S = 0.1, 0.25


def progress(rank: int, at_step: int, idle_s: float = 0.0, **more: object) -> Progress:
    fields = {"waiting": False, "collective": 2, **more}
    return Progress(Rank(rank), Incarnation(0), Step(at_step), idle_s, **fields)  # type: ignore[arg-type]


class Watch:
    """A job of four ranks on one node that steps every 0.1 s."""

    def __init__(self, size: int = 4) -> None:
        self.state, self.now, self.size = State(), 100.0, size
        self.others: list[Command] = []
        self.at_step = 0
        for _ in range(12):
            self.go_on()

    def heartbeat(self, *reports: Progress, node: int = 0) -> tuple[Hung, ...]:
        found = step(self.state, NodeHeartbeat(NodeRank(node), reports), self.now, CONFIG)
        self.state = found.state
        self.others = [each for each in found.commands if not isinstance(each, Hung)]
        return tuple(each for each in found.commands if isinstance(each, Hung))

    def go_on(self) -> None:
        self.now += BEAT_S
        self.at_step += round(BEAT_S / STEP_S)
        others = [progress(rank, self.at_step) for rank in range(self.size)]
        assert self.heartbeat(*others) == ()

    def stay_idle(self, seconds: float, *others: Progress) -> list[Hung]:
        """Heartbeats with growing idle time, until the time is over or a rank is named."""
        found: list[Hung] = []
        until = self.now + seconds
        idle = 0.0
        while self.now < until and not found:
            self.now += BEAT_S
            idle += BEAT_S
            found += self.heartbeat(*(replace(each, idle_s=idle) for each in others))
        self.idle = idle
        return found

    def stalls(self, seconds: float, *reports: Progress) -> Stalled | None:
        """The same, until the job is stalled; no rank may be named as hung."""
        idle, until = 0.0, self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            idle += BEAT_S
            assert not self.heartbeat(*(replace(each, idle_s=idle) for each in reports))
            self.idle = idle
            for each in self.others:
                if isinstance(each, Stalled):
                    return each
        return None


def test_rank_that_others_wait_for_is_named_in_time() -> None:
    watch = Watch()
    still = watch.at_step
    others = [progress(rank, still, waiting=True) for rank in (0, 1, 3)]
    watch.now += BEAT_S
    watch.heartbeat(progress(2, still, BEAT_S, stack="in read()"))  # sent once, long before
    watch.now -= BEAT_S
    (hung,) = watch.stay_idle(10.0, *others, progress(2, still))
    assert hung.rank == 2
    assert "3 ranks wait for it" in hung.evidence
    assert hung.evidence.endswith("in read()")
    assert watch.idle <= 1.0 + 3 * STEP_S + 2 * BEAT_S


def test_rank_that_stays_as_it_is_is_named_again_only_after_a_while() -> None:
    """The manager may have been busy with a repair."""
    watch = Watch()
    waits, hangs = progress(0, watch.at_step, waiting=True), progress(1, watch.at_step)
    assert watch.stay_idle(10.0, waits, hangs)
    since = watch.idle
    found: list[Hung] = []
    while not found:
        watch.now += BEAT_S
        watch.idle += BEAT_S
        reports = (replace(each, idle_s=watch.idle) for each in (waits, hangs))
        found += watch.heartbeat(*reports)
    assert watch.idle - since >= AGAIN_S


def test_stopped_process_is_named_even_inside_a_collective() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    (hung,) = watch.stay_idle(10.0, *others, progress(3, watch.at_step, waiting=True, stopped=True))
    assert (hung.rank, "its process is stopped" in hung.evidence) == (3, True)
    assert hung.stopped


@pytest.mark.parametrize("phase", PHASES)
def test_stopped_process_is_named_before_any_pace_is_known(phase: str) -> None:
    """Also in set-up and after the last step, where no rank is judged by its pace."""
    watch = Watch()
    watch.state = State()
    stopped = progress(1, 0, stopped=True, phase=phase)
    (hung,) = watch.stay_idle(10.0, progress(0, 0, phase=phase), stopped)
    assert (hung.rank, hung.stopped) == (1, True)
    assert "a signal stopped its process" in hung.evidence
    assert watch.idle <= CONFIG.stopped_s + 2 * BEAT_S
    assert not watch.stay_idle(10.0, progress(0, 0), stopped), "it is named once"


def test_process_that_continues_in_time_is_not_named_and_the_next_stop_counts_again() -> None:
    watch = Watch()
    watch.state = State()
    running = progress(1, 0, phase="parked")
    stopped = replace(running, stopped=True)
    for _ in range(3):
        assert not watch.stay_idle(CONFIG.stopped_s - BEAT_S, stopped)
        assert not watch.stay_idle(BEAT_S, running)
    assert watch.stay_idle(10.0, stopped)
    assert not watch.stay_idle(BEAT_S, running)
    assert watch.stay_idle(10.0, stopped)


def test_rank_in_an_older_collective_is_behind() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True, collective=3) for rank in (0, 1, 2)]
    late = progress(3, watch.at_step, waiting=True, collective=2, stack="Stack: all_reduce")
    stall = watch.stalls(10.0, *others, late)
    assert stall is not None
    assert stall.behind == ((3, 0),)
    assert "Stack: all_reduce" in stall.evidence
    assert watch.idle <= 1.0 + 3 * STEP_S + 2 * BEAT_S


@pytest.mark.parametrize("collectives", [(9, 9, 9, 9), (4, 4, 9, 9), (1, 2, 3, 4)])
def test_no_rank_is_behind_if_most_are_or_none_is(collectives: tuple[int, ...]) -> None:
    watch = Watch()
    others = [
        progress(rank, watch.at_step, waiting=True, collective=entered, stack=f"stack of {rank}")
        for rank, entered in enumerate(collectives)
    ]
    stall = watch.stalls(20.0, *others)
    assert stall is not None
    assert stall.behind == ()
    assert all(f"stack of {rank}" in stall.evidence for rank in range(4))
    assert watch.idle <= CONFIG.stall_floor_s + 12 * STEP_S + 2 * BEAT_S


def test_ranks_that_disagree_which_collective_is_next_are_stalled() -> None:
    """A replacement waits for a broadcast before its step, the survivors in the step."""
    watch = Watch()
    stays = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    joins = replace(progress(3, watch.at_step), waiting=True, phase="between steps", collective=2)
    assert watch.stalls(20.0, *stays, replace(joins, incarnation=Incarnation(1))) is not None


def test_collective_in_which_a_rank_still_works_is_not_stalled() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    assert watch.stalls(250.0, *others, progress(3, watch.at_step, waiting=True, busy=True)) is None


def test_ranks_that_wait_for_a_replacement_and_it_for_them_are_stalled() -> None:
    watch = Watch()
    stays = [progress(rank, watch.at_step, phase="repairing") for rank in (0, 1, 2)]
    joins = progress(3, 0, waiting=True, phase="starting", collective=1)
    assert watch.stalls(30.0, *stays, replace(joins, incarnation=Incarnation(1))) is not None
    assert Watch().stalls(250.0, *stays) is None, "they copy their state"


def test_wait_that_began_before_the_repair_does_not_mean_that_it_failed() -> None:
    watch = Watch()
    watch.state = replace(watch.state, repaired_at=watch.now)
    began, idle, found = watch.now, 100.0, False
    while not found:
        watch.now += BEAT_S
        idle += BEAT_S
        watch.heartbeat(*(progress(rank, 0, idle, waiting=True) for rank in range(4)))
        found = any(isinstance(each, Stalled) for each in watch.others)
    assert watch.now - began >= CONFIG.stall_floor_s


@pytest.mark.parametrize("phase", ["loading", "starting", "between steps", "section", "leaving"])
def test_rank_outside_of_steps_is_named_after_the_longer_time(phase: str) -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True, phase=phase) for rank in (0, 1, 2)]
    (hung,) = watch.stay_idle(100.0, *others, progress(3, watch.at_step, phase=phase))
    assert hung.rank == 3
    assert CONFIG.quiet_floor_s <= watch.idle <= CONFIG.quiet_floor_s + 2 * BEAT_S


def test_long_pause_between_steps_that_ended_by_itself_is_allowed_again() -> None:
    """Rank 0 uploads a checkpoint while the others wait in a barrier: 25 s, later 45 s."""
    watch = Watch()
    for pause_s in (25.0, 45.0, 85.0):
        others = [
            progress(r, watch.at_step, waiting=True, phase="between steps") for r in (1, 2, 3)
        ]
        alone = progress(0, watch.at_step, phase="between steps")
        assert not watch.stay_idle(pause_s, *others, alone)
        watch.go_on()


@pytest.mark.parametrize("phase", ["starting", "between steps", "section", "leaving"])
def test_rank_that_works_alone_outside_of_steps_is_only_warned_about(phase: str) -> None:
    """It evaluates for an hour, and the others wait in a barrier."""
    watch = Watch()
    idle_s, warnings = 0.0, list[Command]()
    while idle_s < 3600.0:
        idle_s += 1.0
        watch.now += 1.0
        others = [progress(r, watch.at_step, idle_s, waiting=True, phase=phase) for r in (1, 2, 3)]
        assert not watch.heartbeat(
            progress(0, watch.at_step, idle_s, busy=True, phase=phase), *others
        )
        warnings += watch.others
    (warning,) = warnings
    assert isinstance(warning, Warned)
    assert "rank 0 has made no progress for 11.00 s" in warning.evidence
    assert "3 ranks wait for it, and it works" in warning.evidence


def test_rank_that_waits_for_the_work_of_another_by_other_means_is_not_named() -> None:
    """Rank 0 writes a file that rank 1 waits for; the others wait in a barrier."""
    watch = Watch()
    phase = "between steps"
    others = [progress(rank, watch.at_step, waiting=True, phase=phase) for rank in (2, 3)]
    works = progress(0, watch.at_step, busy=True, phase=phase)
    assert not watch.stay_idle(600.0, works, progress(1, watch.at_step, phase=phase), *others)


def test_all_ranks_are_named_when_none_waits_and_none_works() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, phase="between steps") for rank in range(4)]
    found = watch.stay_idle(100.0, *others)
    assert [hung.rank for hung in found] == [0, 1, 2, 3]
    assert CONFIG.idle_floor_s <= watch.idle <= CONFIG.idle_floor_s + 2 * BEAT_S
    assert "no rank shows a sign of work" in found[0].evidence


def test_no_rank_is_named_while_none_waits_and_one_works() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step) for rank in range(3)]
    assert not watch.stay_idle(280.0, *others, progress(3, watch.at_step, busy=True))


def test_busy_rank_has_a_longer_limit() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    assert not watch.stay_idle(250.0, *others, progress(3, watch.at_step, busy=True))


def test_endless_native_loop_is_named_after_the_longer_limit() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    found = watch.stay_idle(400.0, *others, progress(3, watch.at_step, busy=True))
    assert [type(each) for each in found] == [Hung]


def test_python_loop_that_all_wait_for_is_named_in_time() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    spins = progress(3, watch.at_step, busy=True, spinning=True)
    (hung,) = watch.stay_idle(10.0, *others, spins)
    assert hung.rank == 3
    assert watch.idle <= 1.0 + 3 * STEP_S + 0.5 + 2 * BEAT_S


def test_python_loop_has_the_longer_limit_while_others_progress() -> None:
    watch = Watch()
    others = [progress(0, watch.at_step, waiting=True), progress(1, watch.at_step)]
    spins = progress(3, watch.at_step, busy=True, spinning=True)
    assert not [each for each in watch.stay_idle(60.0, *others, spins) if each.rank == 3]
    alone = Watch(size=1)
    assert not alone.stay_idle(60.0, progress(0, alone.at_step, busy=True, spinning=True))


@pytest.mark.parametrize("busy", [True, False])
def test_rank_that_does_new_things_is_never_named(busy: bool) -> None:
    """It saves a checkpoint for ten minutes, and shows new work every half second."""
    watch = Watch()
    idle_s = 0.0
    while idle_s < 600.0:
        idle_s += BEAT_S
        watch.now += BEAT_S
        others = [progress(rank, watch.at_step, idle_s, waiting=True) for rank in (0, 1, 2)]
        saves = replace(progress(3, watch.at_step, idle_s, busy=busy), moving_s=idle_s - 0.5)
        assert watch.heartbeat(*others, saves) == ()


@pytest.mark.parametrize("pace", [2, 10])
def test_slow_rank_with_progress_is_never_named(pace: int) -> None:
    watch = Watch()
    for _ in range(40):
        watch.at_step += 1
        for beat in range(pace):
            watch.now += BEAT_S
            idle = beat * BEAT_S
            others = [progress(rank, watch.at_step, idle, waiting=True) for rank in (0, 1, 2)]
            # It enters a collective every second heartbeat: it makes progress.
            slow = progress(3, watch.at_step, min(idle, BEAT_S))
            assert watch.heartbeat(*others, slow) == ()


def test_limit_grows_with_the_usual_step() -> None:
    watch = Watch()
    for _ in range(40):
        watch.now += 2.0
        watch.at_step += 1
        assert watch.heartbeat(*(progress(rank, watch.at_step) for rank in range(4))) == ()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    assert not watch.stay_idle(6.5, *others, progress(3, watch.at_step))
    assert watch.stay_idle(9.0, *others, progress(3, watch.at_step))


def test_before_the_pace_is_known_a_rank_has_the_longer_time() -> None:
    watch = Watch()
    watch.state = State()
    waits, hangs = progress(0, 1, waiting=True), progress(1, 1)
    assert watch.stay_idle(100.0, waits, hangs)
    assert CONFIG.quiet_floor_s <= watch.idle <= CONFIG.quiet_floor_s + 2 * BEAT_S
    watch.state = State()
    assert not watch.stay_idle(600.0, waits, replace(hangs, busy=True)), "it compiles"


def test_parked_rank_is_not_judged() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    assert not watch.stay_idle(30.0, *others, progress(3, watch.at_step, phase="parked"))
    assert not watch.stay_idle(30.0, *others, progress(3, watch.at_step, judged=False))


def test_limit_doubles_for_a_rank_named_before() -> None:
    watch = Watch()
    others = [progress(rank, watch.at_step, waiting=True) for rank in (0, 1, 2)]
    watch.stay_idle(10.0, *others, progress(3, watch.at_step))
    first = watch.idle
    again = replace(progress(3, watch.at_step), incarnation=Incarnation(1))
    assert watch.stay_idle(30.0, *others, again)
    assert watch.idle > 1.7 * first


def test_heartbeat_of_a_former_incarnation_is_ignored() -> None:
    watch = Watch()
    new = replace(progress(3, watch.at_step), incarnation=Incarnation(1))
    watch.heartbeat(new)
    watch.heartbeat(progress(3, watch.at_step + 5, 99.0))
    assert watch.state.ranks[Rank(3)].progress == new


def test_missing_heartbeats_do_not_make_a_rank_hung() -> None:
    watch = Watch()
    still = watch.at_step
    watch.heartbeat(progress(4, still), node=1)
    for _ in range(40):
        watch.now += BEAT_S
        others = [progress(rank, still, waiting=True) for rank in range(4)]
        assert watch.heartbeat(*others) == ()


def test_rank_missing_from_its_nodes_heartbeat_is_dropped() -> None:
    watch = Watch()
    watch.heartbeat(*(progress(rank, watch.at_step) for rank in range(3)))
    assert set(watch.state.ranks) == {0, 1, 2}
