"""A repair is interrupted when a rank has already received its state: it now holds another step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskd.runtime.clock import monotonic
from taskd.torch.replicas import comparison
from taskd.torch.state import state_link, transfer
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.test_faults_while_repairing import die, put
from tests.integration.torch.world import PATIENCE_S

STEPS = 6


def late_rank(args: dict[str, Any]) -> None:
    """Rank 0 dies in step 4 while rank 2 is still in step 3 and stays there.

    Rank 2 receives the state of the others. When it has it, and before it is reported, they die.
    """
    received_mark = Path(args["folder"]) / "received"
    # Otherwise the ranks would compare the step log at the gate of step 3, and none would pass.
    put(comparison, "may_differ", lambda part: None)
    if args["incarnation"] == 0 and args["rank"] == 2:
        _stay_behind(received_mark)
    elif args["incarnation"] == 0:
        _die_sending(received_mark)
    scripts.ddp(args)


def _stay_behind(received_mark: Path) -> None:
    inject, load = scripts.inject_fault, transfer._load
    # Not a list: an abandoned attempt restores the lists that functions of the script hold.
    kept = threading.local()

    def late(args: dict[str, Any], step: Any, moment: str) -> None:
        if not hasattr(kept, "groups") and (int(step), moment) == (3, "after backward"):
            kept.groups = step._cycle.context.groups
            _until(kept.groups.is_broken)
        inject(args, step, moment)

    def slow(*arguments: Any) -> None:
        load(*arguments)
        received_mark.touch()
        _until(lambda: bool(kept.groups.why))

    put(scripts, "inject_fault", late)
    put(transfer, "_load", slow)


def _die_sending(received_mark: Path) -> None:
    serve = state_link.serve

    def torn(rendezvous: Any, me: int, receivers: list[int], write: state_link.Write) -> None:
        def write_all(request: Any, send: state_link.Send) -> None:
            if 2 in receivers:
                write(request, send)
            _until(received_mark.exists)
            die()

        serve(rendezvous, me, receivers, write_all)

    put(state_link, "serve", torn)


def _until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_S
    while not condition() and monotonic() < deadline:
        threading.Event().wait(0.005)


def test_received_state_counts_as_the_step_that_it_is(tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", scripts.ddp, steps=STEPS))
    kills = [(0, 0, 4, "in forward")]
    world = run(tmp_path / "run", late_rank, steps=STEPS, kills=kills)
    assert [plan.resume for plan in world.plans] == [4, 4]
    assert_same(calm, world)
