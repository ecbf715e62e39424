"""The AI platform, where there is one: how its annotations on the PodGroup are read and written."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.core.clusterd.job_facts import Job
from taskd.model.clusterd import AnnotatePodGroup
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank

CONFIRM = "ProcessConfirmFault"
MOST_DIGITS = 7
"""Of a rank."""


def wanted(job: Job) -> str:
    """The strategy that the platform names; empty while it names none."""
    word = (job.platform.strategy or "").strip(" ,")
    return word if word in ("retry", "recover", "dump") else ""


def wanted_finally(job: Job) -> str:
    """As above; once the faults are confirmed, the platform may also want the job to exit."""
    word = (job.platform.strategy or "").strip(" ,")
    return word if word == "exit" else wanted(job)


def foreign_confirmation(job: Job) -> bool:
    """Somebody else's faults still wait to be confirmed: ours would be mistaken for them."""
    return bool(job.platform.confirm) and job.platform.confirm != job.confirm


def ask(faults: Iterable[Fault]) -> AnnotatePodGroup:
    return AnnotatePodGroup(CONFIRM, ",".join(f"{f.rank}:{f.kind}" for f in faults))


def read_faults(text: str) -> tuple[Fault, ...]:
    """`rank:type,rank:type`. An entry that cannot be read is left out, and only that one."""
    faults = []
    for entry in text.split(","):
        rank, _, kind = (part.strip() for part in entry.partition(":"))
        if rank.isdecimal() and len(rank) <= MOST_DIGITS and kind in list(FaultKind):
            faults.append(Fault(Rank(int(rank)), FaultKind(kind), evidence="named by the platform"))
    return tuple(faults)


def rank_table_ready(job: Job) -> bool | None:
    """None: the platform has not said."""
    text = (job.platform.rank_table or "").strip()
    return text == "true" if text else None
