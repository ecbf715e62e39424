"""The process group that DDP, FSDP and user code see: torch's own, made resilient.

It is a `torch.distributed.ProcessGroup` registered as the backend "taskd". Each operation goes to
the transport of the current incident. Inside a protected step errors are absorbed; outside of it
they are raised, as natively. `groups.py` holds the mode that all groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from taskd.torch.groups.all_groups import Groups, Mode
from taskd.torch.groups.coalesced import Joint, teach_batches
from taskd.torch.groups.solo_results import ALONE, Alone
from taskd.torch.groups.transport import Shape, Splittable, Transport, alone
from taskd.torch.groups.works import Finished, Guarded, Spoilt, Streamed

BACKEND = "taskd"


class ResilientGroup(dist.ProcessGroup):
    """One group. What it is stays; what carries it is replaced at every incident."""

    def __init__(self, groups: Groups, shape: Shape) -> None:
        super().__init__(shape.rank, shape.size)  # type: ignore[call-arg]
        self.shape, self._full = shape, shape.ranks
        self._groups = groups
        self.transport: Transport | None = None
        """Of the current incident."""
        self._alone: dist.ProcessGroup | None = None
        self._joint: Joint | None = None
        self._name, self._desc = shape.name, "undefined"
        only_gloo = set(shape.backends.values()) == {"gloo"}
        self._handle: type[Guarded | Streamed] = Guarded if only_gloo else Streamed

    def form(self, store: Store) -> None:
        self.transport = Transport(self.shape, store)
        self.transport.form()

    def become(self, members: tuple[int, ...]) -> None:
        """Of the ranks that the script made it of, those that are in the job now.

        torch sees the job's ranks numbered without gaps, in their old order.
        """
        ranks = tuple(rank for rank in self._full if rank in members)
        me = self.shape.ranks[self.shape.rank]
        self.shape = replace(self.shape, ranks=ranks, rank=ranks.index(me))
        c10d._world.pg_group_ranks[self] = {members.index(r): at for at, r in enumerate(ranks)}

    def drop(self, at_rest: bool) -> None:
        """Let go of the transport of the last incident."""
        self._leave_joint()
        if self.transport is not None:
            self.transport.bury(at_rest)
            self.transport = None

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group underneath; one of our own while there are no peers."""
        if self.transport is not None:
            return self.transport.inner
        if self._alone is None:
            self._alone = alone(list(self.shape.backends))
        return self._alone

    def _run(self, name: str, effect: Alone, args: tuple[Any, ...], kwargs: Any) -> dist.Work:
        groups = self._groups
        if groups.mode is Mode.LIVE:
            groups.begun += 1
            operation: Callable[..., dist.Work] = getattr(self.inner, name)
            if not groups.absorbing:
                groups.done += 1
                native = operation(*args, **kwargs)
                if self._joint is not None:
                    self._joint.add(name, args)
                    return native
                return groups.setup.keep(self._name, name, args, native)  # type: ignore[return-value]
            spoilt = partial(effect, self.shape.rank, args)
            try:
                return self._guarded(operation(*args, **kwargs), spoilt)
            except RuntimeError as error:
                groups.absorb(error)
        elif groups.mode is Mode.BROKEN and not groups.absorbing:
            raise dist.DistBackendError(f"the process group was aborted: {groups.why}")
        elif groups.mode is Mode.ALONE and self._joint is not None:
            self._joint.add(name, args)
        elif groups.mode is Mode.ALONE:
            recalled = groups.setup.recall(self._name, name, args)
            if recalled is not None:
                return Finished(recalled)
        return Finished(effect(self.shape.rank, args))

    def _guarded(self, work: dist.Work | None, spoilt: Spoilt) -> dist.Work:
        """None: it is in the stream that the caller works in, who need not wait for it."""
        return self._handle(self._groups, Finished([]) if work is None else work, spoilt)

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows is to be taken as one, until `_end_coalescing`."""
        inner = self.inner if self._groups.mode is Mode.LIVE else None
        if inner is not None:
            inner._start_coalescing(device)
        self._joint = Joint(inner, device)

    def _leave_joint(self) -> None:
        """An exception has left such a block in the middle, and torch does not end it then."""
        joint, self._joint = self._joint, None
        if joint is not None:
            c10d._world.pg_coalesce_state.pop(self, None)
            if joint.inner is not None:
                with suppress(RuntimeError):
                    joint.inner._end_coalescing(joint.device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        groups, joint, self._joint = self._groups, self._joint, None
        assert joint is not None, "_end_coalescing without _start_coalescing"
        outputs = joint.outputs
        if joint.inner is None:
            if groups.mode is Mode.ALONE:
                groups.setup.recall(self._name, "coalesced", (outputs,))
            return Finished(outputs)
        try:
            work: dist.Work | None = joint.inner._end_coalescing(device)
        except RuntimeError as error:
            if not groups.absorbing:
                raise
            groups.absorb(error)
            return Finished(outputs)
        if groups.absorbing:
            return self._guarded(work, lambda: outputs)
        return groups.setup.keep(self._name, "coalesced", (outputs,), work)  # type: ignore[return-value]

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._run("barrier", ALONE["barrier"], (), {}).wait()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """A child of some of our ranks. Formed at the meeting like any other group.

        Under a name of our own: torch's depends on how many groups this process is in.
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
        child._set_group_name(group_name or child.shape.name)
        child._set_group_desc(group_desc or "undefined")
        child.bound_device_id = self.bound_device_id
        self._groups.add(child)
        return child

    # What torch asks of a group besides communication. The C++ base answers from its registered
    # backends and we register none, so that a rebuilt one is never mixed up with the old.

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
    def group_name(self) -> c10d.GroupName:
        return c10d.GroupName(self._name)

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
        real = self.inner._get_backend(device)
        is_nccl = self.shape.backends.get(device.type) == "nccl"
        if is_nccl and (self.transport is None or self.bound_device_id is not None):
            return Splittable(real)
        return real

    def get_group_store(self) -> Store:
        return self._groups.store

    def _get_sequence_number_for_group(self) -> int:
        return self._groups.begun

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def problem(self) -> str:
        """What the library underneath has against going on. Nothing: nothing that it knows of."""
        return "" if self.transport is None else self.transport.problem()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def shutdown(self) -> None:
        self._groups.discard(self)
        self.abort()
        self.drop(self._groups.settle())


def _operation(name: str, effect: Alone) -> Callable[..., dist.Work]:
    def operation(self: ResilientGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._run(name, effect, args, kwargs)

    operation.__name__ = name
    return operation


for _name, _effect in ALONE.items():
    setattr(ResilientGroup, _name, _operation(_name, _effect))


def register(groups: Groups, backends: dict[str, str]) -> None:
    """Make "taskd" a backend of torch.distributed that creates resilient groups."""
    teach_batches(lambda group: isinstance(group, ResilientGroup))

    def create(told: Any, options: Any) -> ResilientGroup:
        ranks = tuple(told.global_ranks_in_group)
        # torch numbers the ranks that are in the job now; we name them as the job was started.
        ranks = tuple(groups.world.shape.ranks[at] for at in ranks) or tuple(range(told.group_size))
        shape = Shape(told.group_id, ranks, told.group_rank, told.timeout, backends)
        group = ResilientGroup(groups, shape)
        if told.global_ranks_in_group:
            group.bound_device_id = groups.world.bound_device_id
        groups.add(group)
        return group

    if BACKEND.upper() in c10d.Backend._plugins:
        plugin = c10d.Backend._plugins[BACKEND.upper()]
        c10d.Backend._plugins[BACKEND.upper()] = plugin._replace(creator_fn=create)
        return
    c10d.Backend.register_backend(BACKEND, create, extended_api=True, devices=list(backends))
