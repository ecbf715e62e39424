"""A repair is cut short when a rank has its new state already: it holds another step by then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskd.runtime.clock import monotonic
from taskd.torch.state import state_link as courier
from taskd.torch.state import transfer as state
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.test_faults_while_repairing import die, put
from tests.integration.torch.world import PATIENCE_S

STEPS = 6


def one_is_left(told: dict[str, Any]) -> None:
    """Rank 0 dies in step 4, when rank 2 is still in step 3 and stays there.

    Rank 2 is given what the others hold. When it has that, and before anybody knows, they die.
    """
    taken = Path(told["folder"]) / "taken"
    if told["life"] == 0 and told["rank"] == 2:
        _stay_behind(taken)
    elif told["life"] == 0:
        _die_giving(taken)
    scripts.ddp(told)


def _stay_behind(taken: Path) -> None:
    strike, adopt = scripts.strike, state._adopt
    jobs: list[Any] = []

    def late(told: dict[str, Any], step: Any, moment: str) -> None:
        if not jobs and (int(step), moment) == (3, "after backward"):
            jobs.append(step._job)
            _until(step._job._groups.trouble)
        strike(told, step, moment)

    def slow(*args: Any) -> None:
        adopt(*args)
        taken.touch()
        _until(lambda: bool(jobs[0]._groups.why))

    put(scripts, "strike", late)
    put(state, "_adopt", slow)


def _die_giving(taken: Path) -> None:
    give = courier.give

    def torn(meeting: Any, me: int, takers: list[int], write: courier.Write) -> None:
        def write_all(wanted: Any, send: courier.Send) -> None:
            if 2 in takers:
                write(wanted, send)
            _until(taken.exists)
            die()

        give(meeting, me, takers, write_all)

    put(courier, "give", torn)


def _until(what: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_S
    while not what() and monotonic() < deadline:
        threading.Event().wait(0.005)


def test_a_state_that_was_taken_counts_as_what_it_is(tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", scripts.ddp, steps=STEPS))
    kills = [(0, 0, 4, "in forward")]
    world = run(tmp_path / "run", one_is_left, steps=STEPS, kills=kills)
    assert [plan.resume for plan in world.plans] == [4, 4]
    assert_same(calm, world)
