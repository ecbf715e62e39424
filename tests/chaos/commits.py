"""Checks the step logs of the ranks of a small world: no step is lost, none is done twice.

A line of a rank's log (`scripts.record_commit`) holds its incarnation, the incident and the step at
which a step began, and both again after it. Without an incident a step is committed, and the next
one follows; an incident may move a rank only to where its plan resumes, and not far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskd.model.messages import Parked, Repaired
from tests.integration.torch.world import World


@dataclass(frozen=True)
class Entry:
    incarnation: int
    incident: int
    step: int
    incident_after: int
    step_after: int


@dataclass
class Walk:
    """Follows one rank through its steps, across its incarnations."""

    resumed: Mapping[int, int]
    taken_back: int
    incarnation: int = 0
    incident: int = 0
    at: int = 0

    def follow(self, entry: Entry) -> None:
        assert entry.incarnation == self.incarnation or entry.incident > self.incident, (
            f"no incident began {entry}"
        )
        self._move(entry.incident)  # between two steps, or in a new incarnation
        assert entry.step == self.at, f"{entry} does not follow step {self.at}"
        if entry.incident_after == entry.incident:
            self.at += 1
        else:
            self._move(entry.incident_after)
        assert entry.step_after == self.at, f"{entry} does not lead to step {self.at}"
        self.incarnation = entry.incarnation

    def _move(self, incident: int) -> None:
        """To the step at which the newest incident resumed. Peers are at most one step ahead."""
        since = incident - self.incident
        if since:
            step = self.resumed[incident]
            assert since > 0, f"incident {incident} came after {self.incident}"
            assert self.at - self.taken_back * since <= step <= self.at + 1, (
                f"incident {incident} moved a rank from step {self.at} to {step}"
            )
            self.incident, self.at = incident, step


def check(world: World, steps: int, taken_back: int) -> None:
    """No step is lost, and none is done twice except those that a plan took back.

    `taken_back`: how many committed steps of a living rank a plan may undo.
    """
    resumed = _resumed(world)
    for body in world.received:
        if isinstance(body, Parked) and body.whole and body.incident in resumed:
            committed = body.step - 1 if body.undo else body.step
            assert resumed[body.incident] >= committed - taken_back, f"steps are lost: {body}"
    for rank, incarnations in world.incarnations.items():
        lines = (world.folder / f"commits-{rank}").read_text().splitlines()
        log = [Entry(*map(int, line.split())) for line in lines]
        assert {entry.incarnation for entry in log} == set(range(incarnations + 1)), (
            f"the incarnations of rank {rank}"
        )
        walk = Walk(resumed, taken_back)
        for entry in log:
            walk.follow(entry)
        assert walk.at == steps, f"rank {rank} ended at step {walk.at}"


def _resumed(world: World) -> dict[int, int]:
    """The step at which each incident resumed. All repaired ranks must have reported the same."""
    reported = {
        (int(one.incident), int(one.step)) for one in world.received if isinstance(one, Repaired)
    }
    resumed = dict(reported)
    assert len(resumed) == len(reported), (
        f"the ranks resumed at different steps: {sorted(reported)}"
    )
    return resumed
