"""After a fault: whether ranks that count as replicas have held the same until the end.

At the gate the ranks compare their whole state rarely (`state_classes.py`). Since the last time, it
may have become different. So before a rank is given the state of a peer, all ranks put their
evidence together: fingerprints of what the survivors hold, and samples that each rank has left in
its node's shared memory in every step, also the lost one. Where ranks of one class turn out to
differ, the class is divided. Then no rank holds what the lost one had, and the manager restarts all
ranks instead of giving a replacement the wrong state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from taskd.core.worker import state_classes
from taskd.core.worker.state_classes import Agreement, StatePrint
from taskd.model.ids import Rank

NO_STEP = -1

SampleKey = tuple[int, int, int]
"""The incident and the version of the agreement since which samples were taken, and the step."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one rank knows about its state, or a replacement about that of its predecessor."""

    step: int = NO_STEP
    """The step whose state it holds. NO_STEP: it has none, as a replacement."""
    whole: StatePrint | None = None
    """The fingerprints of that state, if they were taken."""
    late: Mapping[str, int] = field(default_factory=dict)
    """Parts that have changed after an update, and the first step that has them changed."""
    samples: Mapping[SampleKey, int] = field(default_factory=dict)
    """Numbers that are equal where all samples up to that step are."""


def review(before: Agreement, resume: int, evidence: Mapping[Rank, Evidence]) -> Agreement:
    """The agreement after all members have shown their evidence; the same one if all is well."""
    after = _review_states(before, resume, evidence)
    after = _review_samples(after, resume, evidence)
    after = _review_late_parts(after, resume, evidence)
    return after if after == before else replace(after, version=before.version + 1)


def _review_states(
    agreement: Agreement, resume: int, evidence: Mapping[Rank, Evidence]
) -> Agreement:
    shown = {rank: one for rank, one in evidence.items() if one.whole is not None}
    for step, ranks in groupby(
        sorted(shown, key=lambda rank: shown[rank].step), key=lambda rank: shown[rank].step
    ):
        prints = {rank: one for rank in ranks if (one := shown[rank].whole) is not None}
        agreement = state_classes.agree(agreement, step, min(step, resume), prints)
    return agreement


def _review_samples(
    agreement: Agreement, resume: int, evidence: Mapping[Rank, Evidence]
) -> Agreement:
    unknown = (0,) * len(agreement.parts)
    for key in sorted({key for one in evidence.values() for key in one.samples}):
        prints = {
            rank: StatePrint(one.samples[key], parts=unknown)
            for rank, one in evidence.items()
            if key in one.samples
        }
        agreement = state_classes.agree(agreement, key[-1], resume, prints)
    return agreement


def _review_late_parts(
    agreement: Agreement, resume: int, evidence: Mapping[Rank, Evidence]
) -> Agreement:
    """What a lost rank has made of such a part is not known, and has never been compared."""
    if all(one.step != NO_STEP for one in evidence.values()):
        return agreement
    unknown = {
        part: resume
        for part, since in late_parts(evidence.values()).items()
        if since >= resume and part not in agreement.own_parts
    }
    return replace(agreement, own_parts={**agreement.own_parts, **unknown})


def late_parts(evidence: Iterable[Evidence]) -> dict[str, int]:
    """What the ranks know together: a replacement has not seen the first time."""
    known: dict[str, int] = {}
    for one in evidence:
        for part, since in one.late.items():
            known[part] = min(since, known.get(part, since))
    return known


def explain(before: Agreement, after: Agreement) -> str:
    """Why no rank is given the state of a peer, in words."""
    reasons = []
    divided = [rank for rank in after.shards if after.shards[rank] != before.shards[rank]]
    if divided:
        reasons.append(f"the models or optimizers of ranks {_join(divided)} have become different")
    if own := sorted(after.own_parts.keys() - before.own_parts.keys()):
        reasons.append(f"{', '.join(own)} may have become different")
    if after.buffers_since != before.buffers_since:
        reasons.append("the buffers of the models have become different")
    return (
        f"{'; '.join(reasons)} since the ranks last compared them: "
        "no rank can be given the state of another"
    )


def _join(ranks: Iterable[Rank]) -> str:
    return ", ".join(map(str, sorted(ranks)))
