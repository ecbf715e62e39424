"""Turns what the job's manager reports about slow ranks into faults of their devices."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.clusterd.cluster.objects import JobFacts
from taskd.model.faults import SeenFault
from taskd.model.ids import Rank

STRAGGLER, SUB_HEALTH = "straggler", "SubHealthFault"


def stragglers_seen(facts: JobFacts, ranks: Iterable[Rank]) -> list[SeenFault]:
    """A straggler counts as a sub-healthy device; the job's settings say what follows."""
    slow = set(ranks)
    return [
        SeenFault(rank, STRAGGLER, SUB_HEALTH, pod.uid)
        for pod in facts.pods
        for rank in pod.ranks
        if rank in slow
    ]
