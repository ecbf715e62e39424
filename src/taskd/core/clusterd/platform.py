"""The AI platform, if there is one: reading and writing its annotations on the PodGroup."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.core.clusterd.job_facts import Job
from taskd.model.clusterd import AnnotatePodGroup
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank
from taskd.model.strategies import WireStrategy

CONFIRM = "ProcessConfirmFault"
MAX_RANK_DIGITS = 7
STRATEGIES: dict[str, WireStrategy] = {
    word: word for word in (WireStrategy.RETRY, WireStrategy.RECOVER, WireStrategy.DUMP)
}


def wanted(job: Job) -> WireStrategy | None:
    """The strategy that the platform names; None while it names none."""
    return STRATEGIES.get((job.platform.strategy or "").strip(" ,"))


def wanted_finally(job: Job) -> WireStrategy | None:
    """Like `wanted`; once the faults are confirmed, the platform may also name `exit`."""
    word = (job.platform.strategy or "").strip(" ,")
    return WireStrategy.EXIT if word == WireStrategy.EXIT else wanted(job)


def foreign_confirmation(job: Job) -> bool:
    """Faults of another writer still wait for confirmation: ours would be mixed up with them."""
    return bool(job.platform.confirm) and job.platform.confirm != job.confirm


def ask(faults: Iterable[Fault]) -> AnnotatePodGroup:
    return AnnotatePodGroup(CONFIRM, ",".join(f"{f.rank}:{f.kind}" for f in faults))


def read_faults(text: str) -> tuple[Fault, ...]:
    """Read `rank:type,rank:type`. An entry that cannot be read is skipped."""
    faults = []
    for entry in text.split(","):
        rank, _, kind = (part.strip() for part in entry.partition(":"))
        if rank.isdecimal() and len(rank) <= MAX_RANK_DIGITS and kind in list(FaultKind):
            faults.append(Fault(Rank(int(rank)), FaultKind(kind), evidence="named by the platform"))
    return tuple(faults)


def rank_table_ready(job: Job) -> bool | None:
    """None: the platform has not answered yet."""
    text = (job.platform.rank_table or "").strip()
    return text == "true" if text else None
