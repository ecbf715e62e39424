"""Whether ranks that count as replicas still hold the same, before one gives its state away.

`comparison.py` calls it at the gate and at the end of each step, to collect evidence;
`apply_plan.py` in a repair, when all members have met. `core/worker/state_evidence.py` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from taskd.core.worker import state_evidence
from taskd.core.worker.state_classes import Agreement, StatePrint
from taskd.core.worker.state_evidence import Evidence, SampleKey
from taskd.model.ids import Rank
from taskd.model.messages import Repair
from taskd.torch.context import JobContext
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import fingerprints
from taskd.torch.state.samples import SampleChain
from taskd.torch.state.sealed import seal, unseal

KEY = "evidence"


class ReplicaCheck:
    """One rank's part in it."""

    def __init__(self, context: JobContext) -> None:
        self._context, self._protected = context, context.protected
        self._samples = SampleChain(context.folder, context.rank, self._protected)
        self._late: dict[str, int] = {}
        """Parts that have changed after an update, and the first step that has them changed."""

    # In each step

    def at_gate(self, agreement: Agreement, step: int, has_left_gradients: bool) -> None:
        """Everything is exchanged, and the weights are not updated yet."""
        context = self._context
        if context.guard is not None or not agreement.has_replicas():
            return
        one_update = len(self._protected.optimizers) == 1
        gradients = one_update and not has_left_gradients
        self._samples.extend(context.incident, agreement.version, step, gradients=gradients)

    def at_end(self, agreement: Agreement, step: int, at_gate: Mapping[str, int]) -> None:
        """The step ends. `at_gate`: the fingerprints of the parts that were compared there."""
        recorded = self._protected.recorded_parts()
        for name, before in at_gate.items():
            if name in self._late or name in agreement.own_parts or name not in agreement.watched:
                continue
            if fingerprints.of_value(recorded[name]) != before:
                self._late[name] = step

    # In a repair

    def evidence(self, plan: Repair) -> Evidence:
        """What this rank can show. It is taken while other ranks are still on their way."""
        held, agreement = self._context.held_step, self._protected.agreement
        samples = self._samples.shown(is_new=held is None)
        if held is None or agreement is None:
            return Evidence(samples=samples)
        whole = self._whole_print(agreement, held) if self._has_peers(agreement, plan) else None
        return Evidence(held, whole, dict(self._late), samples)

    def review(
        self, mine: Evidence, rendezvous: Rendezvous, members: Sequence[int], resume: int
    ) -> Agreement | None:
        """All members call it together. None: nothing has changed."""
        before, store = self._protected.agreement, rendezvous.store
        if before is None:
            return None
        key, incident = f"{KEY}/{self._context.rank}", rendezvous.prefix
        store.set(key, seal(_packed(mine), f"{key} at {incident}"))  # type: ignore[arg-type]
        shown = store.multi_get([f"{KEY}/{rank}" for rank in members])
        evidence = {
            Rank(rank): _unpacked(unseal(one, f"{KEY}/{rank} at {incident}"))
            for rank, one in zip(members, shown, strict=True)
        }
        self._late = state_evidence.late_parts(evidence.values())
        after = state_evidence.review(before, resume, evidence)
        return None if after == before else after

    def _has_peers(self, agreement: Agreement, plan: Repair) -> bool:
        """Whether other survivors count as replicas of this one."""
        rank = Rank(self._context.rank)
        receiving = {*plan.sources, *plan.shards}
        return any(
            other.rank != rank
            and other.rank not in receiving
            and agreement.shards.get(other.rank) == agreement.shards[rank]
            for other in plan.members
        )

    def _whole_print(self, agreement: Agreement, step: int) -> StatePrint:
        """Of tensors and parts only. Rates of learning may follow from where a rank is in its loop,
        and replicas that differ by mistake are the guard's to find."""
        protected = self._protected
        recorded = protected.recorded_parts()
        return StatePrint(
            state=0 if self._context.guard is not None else fingerprints.of_weights(protected),
            buffers=0 if protected.has_own_buffers(step) else fingerprints.of_buffers(protected),
            parts=tuple(
                0
                if name in agreement.own_parts or name not in recorded
                else fingerprints.of_value(recorded[name])
                for name in agreement.parts
            ),
        )


_Packed = tuple[int, tuple[object, ...] | None, dict[str, int], dict[SampleKey, int]]


def _packed(one: Evidence) -> _Packed:
    whole = None if one.whole is None else astuple(one.whole)
    return one.step, whole, dict(one.late), dict(one.samples)


def _unpacked(packed: _Packed) -> Evidence:
    step, whole, late, samples = packed
    return Evidence(step, None if whole is None else StatePrint(*whole), late, samples)  # type: ignore[arg-type]
