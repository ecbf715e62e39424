"""Carries out the manager's repair plan in this process: form groups, send or receive state, open.

`recovery.py` calls it in the training thread; the plan was made by `repair_plan.py`.
Anything that goes wrong is raised as `Transient` and reported to the manager, which makes a new
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from taskd.errors import PeerUnreachable, Transient
from taskd.model.ids import Rank, Step
from taskd.model.messages import Repair, own_name
from taskd.model.strategies import WireStrategy
from taskd.model.worker import LocalRepairDone
from taskd.runtime.clock import monotonic
from taskd.torch.context import JobContext
from taskd.torch.copies import snapshot_file
from taskd.torch.copies.snapshot_file import SnapshotInfo
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.groups.store import Rendezvous
from taskd.torch.operations import nic_switch
from taskd.torch.replicas.guard import Guard
from taskd.torch.state import pieces, state_link, transfer
from taskd.torch.state.state_link import Local, Receive, Send, StateRequest
from taskd.torch.state.transfer import StateImage


class CannotRepair(Transient):
    """The plan does not fit the state of this rank."""


def apply(plan: Repair, context: JobContext, at_rendezvous: Callable[[], None]) -> LocalRepairDone:
    """Returns when this rank holds the plan's step and its groups are open.

    `at_rendezvous` is called when all ranks have met and exchanged their state.
    """
    mine, groups, guard = context.local_state, context.groups, context.guard
    started = monotonic()
    mine.protected.received_turn = {}
    if mine.step != plan.resume and any(mine.rank in others for others in plan.helpers.values()):
        raise CannotRepair(
            f"this rank holds step {mine.step}, but the plan wants it to help with {plan.resume}"
        )
    receivers = [receiver for receiver, sender in plan.sources.items() if sender == mine.rank]
    own_receivers = [to for to, sender in plan.own_sources.items() if sender == mine.rank]
    image = _image(plan, mine) if receivers and mine.step == plan.resume else None
    helped = [receiver for receiver, others in plan.helpers.items() if mine.rank in others]
    if helped and pieces.is_large(mine.protected):
        image = image or _image(plan, mine)
    else:
        helped = []
    timeout = timedelta(seconds=plan.timeout_s)
    store = plan.store or context.settings.store
    members = tuple(sorted(member.rank for member in plan.members))
    if plan.strategy != WireStrategy.CONTINUE:
        nic_switch.agree_on_interface(
            store, plan.incident, members, mine.rank, is_new=mine.step is None
        )
    prefix = f"{plan.incident}/"
    evidence = None
    if context.comparison is not None and plan.sources:
        evidence = context.comparison.replicas.evidence(plan)
    if image is not None and not _are_local(plan, mine, receivers):
        image.seal()  # while the others are still on their way
    if guard is not None:
        try:
            guard.publish(store, prefix, timeout)
        except RuntimeError as error:
            raise CannotRepair(f"cannot tell the peers whose state is wrong: {error}") from error
    groups.form_all(plan.incident, store, prefix, timeout, members)
    formed = monotonic()
    try:
        if guard is not None:
            _check_own_verdict(guard, mine, groups.rendezvous)
        if context.comparison is not None:
            context.comparison.exchange(groups.rendezvous, members, plan.resume)
            if context.shard != mine.shard:
                mine, image = context.local_state, None
            if evidence is not None:
                context.comparison.review(evidence, groups.rendezvous, members, plan.resume)
        everyone = receivers + helped + own_receivers
        _exchange_state(plan, mine, groups.rendezvous, everyone, image)
        if context.comparison is not None and mine.step != plan.resume:
            context.comparison.receive_turn(groups.rendezvous)
            mine.protected.keep_turn(plan.resume)
        at_rendezvous()
    except RuntimeError as error:
        raise CannotRepair(groups.why or str(error)) from error
    if mine.snapshots is not None:
        mine.snapshots.forget_after(plan.resume)
    groups.open()
    return LocalRepairDone(plan.incident, Step(plan.resume), formed - started, monotonic() - formed)


def _check_own_verdict(guard: Guard, mine: LocalState, rendezvous: Rendezvous) -> None:
    """The groups may have broken before we learned that our state differs from our replica's."""
    last_good = guard.last_good_step(rendezvous, mine.rank)
    if last_good is None or mine.step is None or mine.step <= last_good:
        return
    mine.protected.step = None
    if mine.snapshots is not None:
        mine.snapshots.distrust([mine.rank], last_good)
    raise CannotRepair(f"the state of this rank differs from its replica's since step {last_good}")


def _image(plan: Repair, mine: LocalState) -> StateImage:
    return StateImage(mine.protected, plan.resume, plan.incident, mine.shard)


def _are_local(plan: Repair, mine: LocalState, receivers: Iterable[Rank]) -> bool:
    """Whether all of them will probably get their state without digests. `serve` decides."""
    nodes = {member.rank: member.node for member in plan.members}
    if any(nodes[one] != nodes[Rank(mine.rank)] for one in receivers):
        return False
    return not (pieces.is_large(mine.protected) and any(map(plan.helpers.get, receivers)))


def _exchange_state(
    plan: Repair,
    mine: LocalState,
    rendezvous: Rendezvous,
    receivers: list[Rank],
    image: StateImage | None,
) -> None:
    keep_own = mine.step is not None
    sent: list[SnapshotInfo] = []
    helpers = plan.helpers.get(Rank(mine.rank), ())
    senders = 1 + len(helpers)

    def fetch_share(local: Local, sender: Rank, share: int, use: Callable[[Receive], None]) -> None:
        request = StateRequest(mine.shard, senders, share)
        state_link.fetch(rendezvous, sender, request, use, local.get(sender))

    def read(receive: Receive, local: Local) -> None:
        transfer.receive_state(
            mine.protected,
            plan.resume,
            plan.incident,
            mine.shard,
            receive,
            keep_own,
            [partial(fetch_share, local, helper) for helper in helpers],
            may_be_bare=bool(local),
        )

    def write(request: StateRequest, send: Send) -> None:
        snapshots = mine.snapshots
        copy = snapshots.find(request.shard, plan.resume) if snapshots is not None else None
        if image is not None and request.shard == mine.shard:
            # Several senders must hold the same: digests prove that.
            bare = request.is_local and not image.is_shared_by(request.senders)
            image.send(send, request.senders, request.share, bare=bare)
        elif copy is not None:
            sent.append(copy)
            snapshot_file.send_file(copy, send)
        else:
            raise CannotRepair(
                f"this node has no copy of shard {request.shard!r} at step {plan.resume}"
            )

    def read_own(receive: Receive) -> None:
        name = own_name(mine.rank)
        transfer.receive_state(
            mine.protected, plan.resume, plan.incident, name, receive, keep_own=True
        )

    source = plan.sources.get(Rank(mine.rank))
    own_source = plan.own_sources.get(Rank(mine.rank))
    if source is not None:
        # Helpers send only their share of a large state. Over TCP: it has digests.
        with state_link.local_connections(rendezvous, [source]) as local:
            fetch_share(local, source, 0, partial(read, local=local))
    elif mine.step != plan.resume:
        _load_copy(plan, mine, mine.shard, partial(read, local={}))
    if own_source is not None:
        state_link.fetch(rendezvous, own_source, StateRequest(own_name(mine.rank)), read_own)
    elif mine.step != plan.resume and 0 <= plan.own_since <= plan.resume:
        _load_copy(plan, mine, own_name(mine.rank), read_own)
    if not receivers:
        return
    try:
        state_link.serve(rendezvous, mine.rank, receivers, write)
    except PeerUnreachable:
        # The receiver may have refused a damaged copy. The next plan must not rely on it again.
        for copy in sent:
            if mine.snapshots is not None and not snapshot_file.is_intact(copy):
                mine.snapshots.reject(copy)
        raise


def _load_copy(plan: Repair, mine: LocalState, name: str, read: Callable[[Receive], None]) -> None:
    """Go back to an earlier step with our own copy."""
    found = mine.snapshots.find(name, plan.resume) if mine.snapshots is not None else None
    if mine.snapshots is None or found is None:
        raise CannotRepair(
            f"this rank holds step {mine.step} and has no copy of {name!r} at step {plan.resume}, "
            "where the plan resumes"
        )
    mine.snapshots.read(found, read)
