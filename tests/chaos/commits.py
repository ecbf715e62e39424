"""What the ranks of a small world have written down of each step, and whether it can be true.

A line of a rank's log (`torch_scripts.witness`) tells its life, the incident and the step in which
a step began, and both again after it. Without an incident a step is committed, and the next one
follows; an incident may move a rank only to where its plan resumes, and not far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskd.model.messages import Parked, Repaired
from tests.integration.torch.world import World


@dataclass(frozen=True)
class Entry:
    life: int
    incident: int
    step: int
    incident_after: int
    step_after: int


@dataclass
class Walk:
    """One rank on its way through the steps, from life to life."""

    resumed: Mapping[int, int]
    taken_back: int
    life: int = 0
    incident: int = 0
    at: int = 0

    def follow(self, entry: Entry) -> None:
        assert entry.life == self.life or entry.incident > self.incident, f"nobody began {entry}"
        self._move(entry.incident)  # between two steps, or into a new life
        assert entry.step == self.at, f"{entry} does not follow step {self.at}"
        if entry.incident_after == entry.incident:
            self.at += 1
        else:
            self._move(entry.incident_after)
        assert entry.step_after == self.at, f"{entry} does not lead to step {self.at}"
        self.life = entry.life

    def _move(self, incident: int) -> None:
        """To where the newest incident resumed. The peers are one step ahead at most."""
        since = incident - self.incident
        if since:
            step = self.resumed[incident]
            assert since > 0, f"incident {incident} came after {self.incident}"
            assert self.at - self.taken_back * since <= step <= self.at + 1, (
                f"incident {incident} moved a rank from step {self.at} to {step}"
            )
            self.incident, self.at = incident, step


def check(world: World, steps: int, taken_back: int) -> None:
    """No step is lost, and none is done twice but those that a plan took back.

    `taken_back`: how many steps that a living rank has committed a plan may undo.
    """
    resumed = _resumed(world)
    for told in world.heard:
        if isinstance(told, Parked) and told.whole and told.incident in resumed:
            committed = told.step - 1 if told.undo else told.step
            assert resumed[told.incident] >= committed - taken_back, f"steps are lost: {told}"
    for rank, lives in world.lives.items():
        lines = (world.folder / f"commits-{rank}").read_text().splitlines()
        log = [Entry(*map(int, line.split())) for line in lines]
        assert {entry.life for entry in log} == set(range(lives + 1)), f"the lives of rank {rank}"
        walk = Walk(resumed, taken_back)
        for entry in log:
            walk.follow(entry)
        assert walk.at == steps, f"rank {rank} ended at step {walk.at}"


def _resumed(world: World) -> dict[int, int]:
    """The step at which each incident resumed. All who were repaired must have said the same."""
    told = {(int(one.incident), int(one.step)) for one in world.heard if isinstance(one, Repaired)}
    resumed = dict(told)
    assert len(resumed) == len(told), f"the ranks resumed at different steps: {sorted(told)}"
    return resumed
