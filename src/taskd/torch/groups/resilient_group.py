"""The process group that DDP, FSDP and user code see: torch's own, made resilient.

It is a `torch.distributed.ProcessGroup` registered as the backend "taskd". Each operation goes to
the transport of the current incident. Inside a protected step errors are recorded; outside they
are raised, as by torch's own groups. `all_groups.py` holds the mode that all groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from taskd.torch import compat
from taskd.torch.groups.all_groups import Groups, Mode
from taskd.torch.groups.coalesced import CoalescedBlock, patch_batch_isend_irecv
from taskd.torch.groups.object_broadcast import patch_broadcast_object_list
from taskd.torch.groups.refused_uses import refuse_capture, refuse_symmetric_memory
from taskd.torch.groups.solo_results import SOLO_EFFECTS, SoloEffect
from taskd.torch.groups.transport import (
    Shape,
    SplittableNccl,
    Transport,
    choose_backends,
    solo_group,
)
from taskd.torch.groups.works import DeviceWork, Fallback, Finished, GlooWork, OutsideWork

BACKEND = "taskd"
ORIGINAL = "_taskd_original"
"""Where our function keeps the one of torch that it replaces."""


class ResilientGroup(dist.ProcessGroup):
    """One process group. It stays for the whole job; each incident gives it a new transport."""

    def __init__(self, groups: Groups, shape: Shape) -> None:
        super().__init__(shape.rank, shape.size)  # type: ignore[call-arg]
        self.shape, self._all_ranks = shape, shape.ranks
        self._groups = groups
        self.transport: Transport | None = None
        """Of the current incident."""
        self._solo: dist.ProcessGroup | None = None
        self._block: CoalescedBlock | None = None
        self._name, self._desc = shape.name, "undefined"
        only_gloo = set(shape.backends.values()) == {"gloo"}
        self._work_type: type[GlooWork | DeviceWork] = GlooWork if only_gloo else DeviceWork

    def form(self, store: Store) -> None:
        self.transport = Transport(self.shape, store)
        self.transport.form()

    def set_members(self, members: tuple[int, ...]) -> None:
        """Keep those of the script's ranks that are in the job now.

        torch sees the job's ranks numbered without gaps, in their old order.
        """
        ranks = tuple(rank for rank in self._all_ranks if rank in members)
        own = self.shape.ranks[self.shape.rank]
        self.shape = replace(self.shape, ranks=ranks, rank=ranks.index(own))
        compat.set_group_ranks(self, {members.index(r): at for at, r in enumerate(ranks)})

    def drop(self, idle: bool) -> None:
        """Discard the transport of the last incident. `idle`: as in `Transport.discard`."""
        self._close_block()
        if self.transport is not None:
            self.transport.discard(idle)
            self.transport = None

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group underneath; one that holds only this rank while there are no peers."""
        if self.transport is not None:
            return self.transport.inner
        if self._solo is None:
            self._solo = solo_group(list(self.shape.backends))
        return self._solo

    def _run(self, name: str, effect: SoloEffect, args: tuple[Any, ...], kwargs: Any) -> dist.Work:
        groups = self._groups
        groups.check_peers(name)
        if self._work_type is DeviceWork:
            refuse_capture(name)
        if groups.mode is Mode.LIVE:
            groups.begun += 1
            operation: Callable[..., dist.Work] = getattr(self.inner, name)
            if not groups.absorbing:
                groups.done += 1
                groups.on_outside()
                native = operation(*args, **kwargs)
                if self._block is not None:
                    self._block.add(name, args)
                    return native
                if native is not None and groups.formed_for_step is not None:
                    return OutsideWork(groups, native)
                return groups.setup.record(self._name, name, args, native)  # type: ignore[return-value]
            fallback = partial(effect, self.shape.rank, args)
            try:
                return self._protected_work(operation(*args, **kwargs), fallback)
            except RuntimeError as error:
                groups.absorb(error)
                groups.lost = True
        elif groups.mode is Mode.BROKEN:
            if not groups.absorbing:
                groups.explain_failure_outside()
                raise dist.DistBackendError(f"the process group was aborted: {groups.why}")
            groups.lost = True
        elif groups.mode is Mode.SOLO and self._block is not None:
            self._block.add(name, args)
        elif groups.mode is Mode.SOLO:
            outputs = groups.setup.replay(self._name, name, args)
            if outputs is not None:
                return Finished(outputs)
        return Finished(effect(self.shape.rank, args))

    def _protected_work(self, work: dist.Work | None, fallback: Fallback) -> dist.Work:
        """`work` is None when it is in the caller's own stream, which need not wait for it."""
        return self._work_type(self._groups, Finished([]) if work is None else work, fallback)

    def _start_coalescing(self, device: torch.device) -> None:
        """Run what follows as one operation, until `_end_coalescing`."""
        self._groups.check_peers("a batch of operations")
        inner = self.inner if self._groups.mode is Mode.LIVE else None
        if inner is not None:
            compat.start_coalescing(inner, device)
        self._block = CoalescedBlock(inner, device)

    def _close_block(self) -> None:
        """Close a block that an exception has left in the middle: torch does not do so."""
        block, self._block = self._block, None
        if block is not None:
            compat.forget_coalescing(self)
            if block.inner is not None:
                with suppress(RuntimeError):
                    compat.end_coalescing(block.inner, block.device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        groups, block, self._block = self._groups, self._block, None
        assert block is not None, "_end_coalescing without _start_coalescing"
        outputs = block.outputs
        if block.inner is None:
            if groups.mode is Mode.SOLO:
                groups.setup.replay(self._name, "coalesced", (outputs,))
            groups.lost = groups.lost or groups.mode is Mode.BROKEN
            return Finished(outputs)
        try:
            work = compat.end_coalescing(block.inner, device)
        except RuntimeError as error:
            if not groups.absorbing:
                raise
            groups.absorb(error)
            groups.lost = True
            return Finished(outputs)
        if groups.absorbing:
            return self._protected_work(work, lambda: outputs)
        return groups.setup.record(self._name, "coalesced", (outputs,), work)  # type: ignore[return-value]

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._run("barrier", SOLO_EFFECTS["barrier"], (), {}).wait()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """A child group of some of our ranks, formed at the rendezvous like any other group.

        It gets a name of our own: torch's depends on how many groups this process is in.
        """
        if self.shape.rank not in ranks:
            return None
        members = tuple(self.shape.ranks[rank] for rank in ranks)
        backends = self.shape.backends
        if device_types is not None:
            backends = {one.type: backends[one.type] for one in device_types}
        child = ResilientGroup(
            self._groups,
            Shape(
                name=self._groups.name_split(members),
                ranks=members,
                rank=list(ranks).index(self.shape.rank),
                timeout=timeout or self.shape.timeout,
                backends=backends,
            ),
        )
        compat.name_group(child, group_name or child.shape.name, group_desc or "undefined")
        child.bound_device_id = self.bound_device_id
        self._groups.add(child)
        return child

    # What torch asks of a group besides communication. The C++ base class answers from its
    # registered backends; we register none, so that a new one is never confused with the old.

    def getBackendName(self) -> str:
        return BACKEND

    def getRank(self) -> int:
        return self.shape.rank

    def getSize(self) -> int:
        return self.shape.size

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self.shape.rank

    def size(self) -> int:
        return self.shape.size

    @property
    def group_name(self) -> Any:  # torch's GroupName is a plain string; 2.9 has no name for it
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.shape.backends]

    def _get_backend(self, device: torch.device) -> Any:
        real = compat.backend_of(self.inner, device)
        is_nccl = self.shape.backends.get(device.type) == "nccl"
        if is_nccl and (self.transport is None or self.bound_device_id is not None):
            return SplittableNccl(real)
        return real

    def get_group_store(self) -> Store:
        return self._groups.store

    def _get_sequence_number_for_group(self) -> int:
        return self._groups.begun

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def device_error(self) -> str:
        """An error that the library underneath has noticed and not raised; empty: none."""
        return "" if self.transport is None else self.transport.device_error()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def shutdown(self) -> None:
        self._groups.discard(self)
        self.abort()
        self.drop(self._groups.wait_for_gloo())


def _operation(name: str, effect: SoloEffect) -> Callable[..., dist.Work]:
    def operation(self: ResilientGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._run(name, effect, args, kwargs)

    operation.__name__ = name
    return operation


for _name, _effect in SOLO_EFFECTS.items():
    setattr(ResilientGroup, _name, _operation(_name, _effect))


def register(groups: Groups, backends: dict[str, str]) -> None:
    """Make "taskd" a backend of torch.distributed that creates resilient groups.

    A group that the script makes with a backend of its own, as in `dist.new_group(backend="gloo")`,
    becomes a resilient group over that backend: torch's own could not be formed again.
    """
    patch_batch_isend_irecv(lambda group: isinstance(group, ResilientGroup))
    compat.leave_out_of_flight_recorder(BACKEND)
    patch_broadcast_object_list(groups)
    refuse_symmetric_memory()
    requested: list[dict[str, str]] = []
    _create_groups_as_ours(requested)

    def create(request: Any, options: Any) -> ResilientGroup:
        # torch numbers the ranks that are in the job now; we use the ranks of the job's start.
        current = request.global_ranks_in_group
        ranks = tuple(groups.world.shape.ranks[at] for at in current)
        ranks = ranks or tuple(range(request.group_size))
        own = requested[-1] if requested else backends
        shape = Shape(request.group_id, ranks, request.group_rank, request.timeout, own)
        group = ResilientGroup(groups, shape)
        if current:
            group.bound_device_id = groups.world.bound_device_id
        groups.add(group)
        return group

    plugins = compat.plugins()
    if BACKEND.upper() in plugins:
        plugins[BACKEND.upper()] = plugins[BACKEND.upper()]._replace(creator_fn=create)
        return
    c10d.Backend.register_backend(BACKEND, create, extended_api=True, devices=list(backends))


def _create_groups_as_ours(requested: list[dict[str, str]]) -> None:
    """Replace the backend of each new group by ours, and put the wanted one into `requested`."""
    helper = compat.group_helper()
    original = getattr(helper, ORIGINAL, helper)

    @wraps(original)
    def create_group(
        size: int, rank: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = choose_backends(backend) if ranks else {}
        known = {"gloo", "nccl", *(name.lower() for name in compat.plugins())} - {BACKEND}
        if not wanted or not known.issuperset(wanted.values()):
            return original(size, rank, ranks, backend, *args, **kwargs)
        requested.append(wanted)
        try:
            return original(size, rank, ranks, c10d.Backend(BACKEND), *args, **kwargs)
        finally:
            requested.pop()

    setattr(create_group, ORIGINAL, original)
    compat.set_group_helper(create_group)
