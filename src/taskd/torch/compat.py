"""Every private name of torch that a training process relies on, behind one accessor each.

`check` looks for all of them once, in `taskd.torch.init()`, before anything is built on them; a
torch that lacks one is refused there with the name (`UnknownTorch`), not later with an
AttributeError in the middle of a repair. `check_sharded` does the same for sharded models when
one is protected: their modules take seconds to import, and a script without them must not pay.
The launcher's private names are in `agent/seams/torch_names.py`.

A test fails when any other module of TaskD touches a private name of torch. That is why this one
is long: one table, then one short accessor per name, in the order of the table.
"""

from __future__ import annotations

import gc
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, MutableMapping
from datetime import timedelta
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from taskd import config
from taskd.errors import UnknownTorch
from taskd.runtime.private_names import PrivateName, check_torch, find_owner
from taskd.runtime.torch_versions import minor, supported_torch

_C10D = "torch.distributed.distributed_c10d"
_GROUP = "torch.distributed:ProcessGroup"
_GLOO = "torch.distributed:ProcessGroupGloo"
_NCCL = "torch.distributed:ProcessGroupNCCL"
_REDUCER = "torch._C._distributed_c10d:Reducer"
_DDP = "torch.nn.parallel:DistributedDataParallel"
_SYMMETRIC = "torch._C._distributed_c10d:_SymmetricMemory"
_SCALER = "torch.amp:GradScaler"
_PIPELINING = "torch.distributed.pipelining"
_DCP_COLLECTIVES = "torch.distributed.checkpoint.utils:_DistWrapper"
_DCP_THREAD = (
    "torch.distributed.checkpoint._async_thread_executor:_ThreadBasedAsyncCheckpointExecutor"
)
_NUMBERED_FROM_ZERO = (2, 15)
"""From this version on a backend numbers its collectives without being told to."""


def _names(
    owner: str, names: str, purpose: str, **only: tuple[int, int]
) -> tuple[PrivateName, ...]:
    """One entry for each name; `old|new` where torch has renamed it."""
    optional = owner.startswith(_NCCL)
    return tuple(
        PrivateName(owner, name.replace("|", " "), purpose, optional_owner=optional, **only)
        for name in names.split()
    )


RECOVERY = (
    *_names(
        _GROUP,
        "_register_backend _set_default_backend _set_group_name _set_group_desc _get_backend",
        "forming process groups again after a fault",
    ),
    *_names(
        _GROUP,
        "all_gather_single|_allgather_base all_to_all_single|alltoall_base allgather_coalesced "
        "all_gather_single_coalesced|allgather_into_tensor_coalesced "
        "reduce_scatter_single|_reduce_scatter_base "
        "reduce_scatter_single_coalesced|reduce_scatter_tensor_coalesced recv_anysource",
        "collectives that do not raise inside a step",
    ),
    *_names(_GROUP, "split_group bound_device_id", "dist.split_group in resilient groups"),
    *_names(
        _GROUP, "_start_coalescing _end_coalescing", "dist.batch_isend_irecv in resilient groups"
    ),
    *_names(_GROUP, "_get_sequence_number_for_group", "numbering collectives"),
    *_names(_GROUP, "_allgather_base", "comparing the state of the ranks"),
    *_names(
        _C10D,
        "_get_default_group _check_p2p_op_list _coalescing_manager",
        "dist.batch_isend_irecv in resilient groups",
    ),
    *_names(_C10D, "_new_process_group_helper", "groups with a backend of their own"),
    *_names(_C10D, "_get_object_coll_device", "exchanging sealed objects between ranks"),
    *_names(f"{_C10D}:_World", "pg_group_ranks", "process groups of a job that has shrunk"),
    *_names(f"{_C10D}:_World", "pg_coalesce_state", "leaving a batch of sends after a fault"),
    *_names(f"{_C10D}:Backend", "register_backend _plugins", "registering the backend taskd"),
    *_names(
        f"{_C10D}:Backend",
        "backend_type_map backend_capability",
        "choosing a backend for each device",
    ),
    *_names(
        _C10D,
        "_FR_SELF_RECORDING_BACKENDS",
        "keeping torch's flight recorder off the groups of the backend taskd",
        since=(2, 15),
    ),
    *_names(_C10D, "_DistributedBackendOptions", "creating groups of plugin backends such as HCCL"),
    *_names(_GLOO, "options", "forming gloo groups again after a fault"),
    *_names(
        _GLOO,
        "_set_sequence_number_for_group",
        "forming gloo groups again after a fault",
        until=_NUMBERED_FROM_ZERO,
    ),
    *_names(_GLOO, "_Options create_device", "binding gloo to a network interface"),
    *_names(
        f"{_GLOO}._Options", "_timeout _devices _threads", "binding gloo to a network interface"
    ),
    *_names(_NCCL, "Options", "forming NCCL groups again after a fault"),
    *_names(
        _NCCL,
        "_set_sequence_number_for_group",
        "forming NCCL groups again after a fault",
        until=_NUMBERED_FROM_ZERO,
    ),
    *_names(f"{_NCCL}.Options", "_timeout", "forming NCCL groups again after a fault"),
    *_names("torch.distributed:Work", "_source_rank", "receiving from any source"),
    *_names(_SYMMETRIC, "empty_strided_p2p rendezvous", "refusing symmetric memory"),
    *_names(
        _REDUCER, "_rebuild_buckets prepare_for_backward", "the same DDP buckets on every rank"
    ),
    *_names(
        _DDP,
        "reducer find_unused_parameters static_graph",
        "the same DDP buckets on every rank",
    ),
    *_names(
        _DDP,
        "_build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper",
        "DDP in a job that has shrunk or grown",
    ),
    *_names(
        _DDP,
        "_default_broadcast_coalesced modules_buffers parameters_to_ignore "
        "require_forward_param_sync broadcast_buffers",
        "the same DDP buffers on every rank before a step commits",
    ),
    *_names(_DDP, "_comm_hooks", "the state of communication hooks such as PowerSGD"),
    *_names("torch.nn:Module", "_buffers", "restoring buffers after an abandoned step"),
    *_names("torch", "_foreach_copy_", "copying buffers at the start of a step"),
    *_names("torch:Tensor", "_version", "noticing buffers that change after the update"),
    *_names(
        _SCALER,
        "_scale _growth_tracker _per_optimizer_states",
        "restoring a GradScaler after an abandoned step",
    ),
)
"""Checked by `taskd.torch.init()`."""

DATA = (
    *_names(_C10D, "_get_default_store", "ending an epoch on all ranks"),
    *_names("torch.utils.data:DataLoader", "_get_iterator", "opening a loader at any batch"),
    *_names("torch:Tensor", "_version", "restoring a batch after an abandoned step"),
)
"""Checked by `Job.batches`."""

PROFILING = (
    *_names("torch._C", "_after_autograd_keyset", "recording collectives"),
    *_names("torch.library:Library", "_destroy", "recording collectives"),
    *_names("torch._ops:OpOverload", "_schema", "recording collectives"),
    *_names("torch.utils.data.dataloader", "_BaseDataLoaderIter", "recording data loading"),
)
"""Checked by `taskd.torch.init()`, and when a recording starts in a script without it."""

SHARDED = (
    *_names("torch.distributed.tensor:DTensor", "_local_tensor", "copying the shards of a rank"),
    *_names(
        "torch.distributed.tensor._utils",
        "_compute_local_shape_and_global_offset",
        "writing a lost rank's shard into the emergency checkpoint",
    ),
    *_names(
        "torch.distributed.checkpoint.state_dict",
        "_get_fqns",
        "writing a lost rank's shard into the emergency checkpoint",
    ),
)
"""Checked when a model with distributed tensors is protected."""

PIPELINES = (
    *_names(
        f"{_PIPELINING}.schedules", "_PipelineSchedule", "pipeline stages next to a replacement"
    ),
    *_names(
        f"{_PIPELINING}.stage:_PipelineStageBase",
        "_prepare_forward_infra",
        "pipeline stages next to a replacement",
    ),
)
"""Checked when the script has imported `torch.distributed.pipelining`, by `protect`."""

CHECKPOINTS = (
    *_names(
        _DCP_COLLECTIVES,
        "broadcast_object gather_object all_gather_object scatter_object use_dist is_coordinator "
        "coordinator_rank group",
        "torch.distributed.checkpoint in a replacement",
    ),
    *_names(
        "torch.distributed.checkpoint.state_dict_saver",
        "_save_state_dict",
        "torch.distributed.checkpoint in a replacement",
    ),
    *(
        # Older versions have a function instead, and their failed saves end the script.
        PrivateName(_DCP_THREAD, name, "dcp.async_save during a fault", optional_owner=True)
        for name in ("execute_save", "_executor")
    ),
)
"""Checked when the script imports `torch.distributed.checkpoint`."""

Find = Callable[[PrivateName], Any]


def check(find: Find = find_owner) -> None:
    """Refuse a torch that lacks a name which every protected job needs."""
    if not dist.is_available():
        raise UnknownTorch(
            f"torch {torch.__version__} was built without torch.distributed, which TaskD needs. "
            f"Supported: {supported_torch()}, built with torch.distributed"
        )
    check_torch((*RECOVERY, *PROFILING), find)


@lru_cache(maxsize=1)
def check_once() -> None:
    """The same, once per process: a standby has done it when it becomes a replacement."""
    check()


def check_profiling(find: Find = find_owner) -> None:
    """The names that a recording needs."""
    check_torch(PROFILING, find)


def check_data(find: Find = find_owner) -> None:
    """The names that `Job.batches` needs."""
    check_torch(DATA, find)


def check_sharded(find: Find = find_owner) -> None:
    """The names that sharded models need."""
    check_torch(SHARDED, find)


def check_pipelines(find: Find = find_owner) -> None:
    """Refuse a torch that could not run a pipeline with a replacement in it."""
    if f"{_PIPELINING}.schedules" in sys.modules:
        check_torch(PIPELINES, find)


def check_checkpoints(find: Find = find_owner) -> None:
    """The names that `torch.distributed.checkpoint` in a protected job needs."""
    check_torch(CHECKPOINTS, find)


def check_all(find: Find = find_owner) -> None:
    """Every name of this module, whether or not the job will need it."""
    check(find)
    check_sharded(find)
    check_checkpoints(find)


# Process groups


def register_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
    group._register_backend(device, kind, backend)


def set_default_backend(group: Any, kind: Any) -> None:
    group._set_default_backend(kind)


def name_group(group: Any, name: str, description: str) -> None:
    group._set_group_name(name)
    group._set_group_desc(description)


def backend_of(group: Any, device: torch.device) -> Any:
    return group._get_backend(device)


def start_coalescing(group: Any, device: torch.device) -> None:
    group._start_coalescing(device)


def end_coalescing(group: Any, device: torch.device) -> dist.Work | None:
    work: dist.Work | None = group._end_coalescing(device)
    return work


def all_gather_into(
    group: dist.ProcessGroup, received: torch.Tensor, mine: torch.Tensor
) -> dist.Work:
    """As `dist.all_gather_into_tensor`, whose checks take longer than the exchange of few bytes."""
    work: dist.Work = group._allgather_base(received, mine)
    return work


def forget_coalescing(group: dist.ProcessGroup) -> None:
    """torch keeps the operations of a batch that an exception has left."""
    c10d._world.pg_coalesce_state.pop(group, None)


def set_group_ranks(group: dist.ProcessGroup, ranks: dict[int, int]) -> None:
    """The rank in the job, and the rank in the group, of each member."""
    c10d._world.pg_group_ranks[group] = ranks


def default_group() -> Any:
    return c10d._get_default_group()


def group_helper() -> Callable[..., Any]:
    """The function through which torch creates every group but those that are split off."""
    return c10d._new_process_group_helper


def set_group_helper(helper: Callable[..., Any]) -> None:
    c10d._new_process_group_helper = helper


def device_for_objects(group: Any) -> torch.device:
    """Where torch's own object collectives would put their bytes."""
    return torch.device(c10d._get_object_coll_device(group))


def check_p2p_ops(operations: Any) -> None:
    c10d._check_p2p_op_list(operations)


def coalescing_manager(group: Any, device: torch.device) -> Any:
    return c10d._coalescing_manager(group, device, async_ops=True)


def sequence_number(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def source_rank(work: Any) -> int:
    return int(work._source_rank())


# Backends


def replace_symmetric_memory(function: Callable[..., Any]) -> None:
    """Where every use of it begins: allocating such memory, and meeting the peers."""
    from torch._C._distributed_c10d import _SymmetricMemory

    kind: Any = _SymmetricMemory
    kind.empty_strided_p2p = kind.rendezvous = staticmethod(function)


def plugins() -> MutableMapping[str, Any]:
    """The backends that packages have registered, by their name in capitals."""
    found: MutableMapping[str, Any] = c10d.Backend._plugins
    return found


def backend_type(kind: str) -> Any:
    return c10d.Backend.backend_type_map.get(kind, dist.ProcessGroup.BackendType.CUSTOM)


def leave_out_of_flight_recorder(kind: str) -> None:
    """From torch 2.15 on a recorder is attached to every group whose backend has none of its own.

    It would ask our groups for a backend in C++, which they do not register.
    """
    recorded: set[str] | None = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(kind)


def backend_options() -> Any:
    """Empty options for a plugin's creator function."""
    options: Any = c10d._DistributedBackendOptions  # type: ignore[attr-defined]
    return options()


def start_sequence(backend: Any) -> None:
    """Let the backend number its collectives, as torch did up to 2.14 when it created one."""
    if minor(torch.__version__) < _NUMBERED_FROM_ZERO:
        backend._set_sequence_number_for_group()


def gloo_options(timeout: timedelta, interface: str) -> Any:
    """Options of a gloo group that is bound to this network interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=interface)]
    options._threads = 2
    return options


def nccl_options(timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


# DDP, optimizers, modules


def rebuild_buckets(reducer: Any) -> None:
    reducer._rebuild_buckets()


def rebuild_reducer(model: Any) -> None:
    """DDP's reducer keeps the number of ranks that it divides by."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)


def broadcast_coalesced(model: Any, tensors: list[torch.Tensor]) -> None:
    """Send DDP's buffers from rank 0, as DDP does."""
    model._default_broadcast_coalesced(tensors)


def hooks_of(model: Any) -> list[tuple[Any, Any]]:
    """DDP's communication hooks, each with its state."""
    return list(model._comm_hooks)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary itself: a new tensor can be put in."""
    return module._buffers


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every change in place."""
    return tensor._version


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source over its target, in one call for all of them."""
    torch._foreach_copy_(targets, sources)


def scaler_state(scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and growth tracker: the tensors themselves, without waiting for a device."""
    return scaler._scale, scaler._growth_tracker


def set_scaler_state(scaler: Any, scale: torch.Tensor | None, growth: torch.Tensor | None) -> None:
    scaler._scale, scaler._growth_tracker = scale, growth


def forget_scaler_step(scaler: Any) -> None:
    """A GradScaler remembers what it has found in the step that was abandoned."""
    scaler._per_optimizer_states.clear()


# Profiling


def below_autograd(keyset: Any) -> Any:
    """The dispatch keys that come after our own kernel."""
    return keyset & torch._C._after_autograd_keyset


def remove_kernels(library: Any) -> None:
    library._destroy()


def argument_positions(operation: Any) -> dict[str, int]:
    """Where each argument of an operator is."""
    return {argument.name: at for at, argument in enumerate(operation._schema.arguments)}


def data_loader_iterator() -> type:
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def iterates_as_data_loader(kind: Any) -> bool:
    """Whether a subclass of DataLoader leaves the iteration as it is."""
    from torch.utils.data import DataLoader

    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def version(tensor: torch.Tensor) -> int:
    """How often it was changed in place. Always 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The same for many tensors. None of them was made in inference mode."""
    return list(map(_VERSION, tensors))


_VERSION = operator.attrgetter("_version")


def default_store() -> dist.Store:
    """The store of the default group."""
    return c10d._get_default_store()


def compile_in_process() -> None:
    """Let inductor compile without a pool of other processes, unless the user wants one."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    if config.compile_in_process() and inductor is not None:
        inductor.compile_threads = 1


def trace_and_forget() -> None:
    """Trace a small model with torch.compile, without generating code. Leaves nothing behind."""
    import torch._dynamo.utils

    model: Any = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


# Distributed tensors and checkpoints


def local_tensor(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank holds."""
    local: torch.Tensor = tensor._local_tensor
    return local


def shard_place(whole: Any, coordinate: list[int]) -> tuple[list[int], list[int]]:
    """Shape and offsets of the shard that the rank at this coordinate of the mesh holds."""
    from torch.distributed.tensor import _utils

    shape, offsets = _utils._compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh.shape, coordinate, whole.placements
    )
    return list(shape), list(offsets)


def checkpoint_names(model: nn.Module, name: str) -> set[str]:
    """The names that `torch.distributed.checkpoint` gives to this parameter or buffer."""
    from torch.distributed.checkpoint import state_dict

    return set(state_dict._get_fqns(model, name))


def wrap_checkpoint_collectives(
    started: Callable[[Any], None],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap what DCP exchanges with other ranks; `started` gets the object of each save or load."""
    from torch.distributed.checkpoint import utils

    owner: Any = utils._DistWrapper
    original = inspect.unwrap(owner.__init__)

    @wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        started(self)

    owner.__init__ = initialise
    names = ("broadcast_object", "gather_object", "all_gather_object", "scatter_object", "barrier")
    for name in names:
        if hasattr(owner, name):  # older versions have no `barrier`
            setattr(owner, name, wrap(inspect.unwrap(getattr(owner, name))))


def checkpoint_coordinator(collectives: Any) -> int:
    """The rank in the whole job that plans the checkpoint."""
    # Older versions take the rank in the group for it.
    found = getattr(collectives, "global_coordinator_rank", collectives.coordinator_rank)
    return int(found)


def wrap_checkpoint_save(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what `dcp.save` and `dcp.async_save` do with the state dict."""
    from torch.distributed.checkpoint import state_dict_saver

    original = inspect.unwrap(state_dict_saver._save_state_dict)
    state_dict_saver._save_state_dict = wrap(original)


def wrap_checkpoint_thread(called: Callable[[Any, Any], None]) -> None:
    """Call this with the thread pool of each `dcp.async_save`, in the thread that called it, and
    with the process group that it uses; None: it uses none."""
    owner: Any = find_owner(PrivateName(_DCP_THREAD, "execute_save", ""))
    if owner is None:
        return
    original = inspect.unwrap(owner.execute_save)

    @wraps(original)
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("process_group") or default_group()
        called(self._executor, None if kwargs.get("no_dist") else group)
        return original(self, *args, **kwargs)

    owner.execute_save = execute_save


def forget_checkpoint_plans() -> None:
    """Drop the plans of earlier saves (`DefaultSavePlanner(enable_plan_caching=True)`)."""
    from torch.distributed.checkpoint.planner import SavePlanner

    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(value, dict):
            value.clear()


def no_checkpoint() -> Any:
    """What `dcp.save` returns where nothing was saved."""
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata(state_dict_metadata={})


# FSDP2. From torch 2.13 on it can forget a lost step by itself (`_reset_iter_state`). For older
# versions it is done here, from outside.

_ITERATION = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
"""What FSDP2 keeps about an iteration of the whole model and has before the first one."""
_PENDING = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)
"""What it keeps in each parameter group: results that were started and not used."""
_ACCUMULATED = "unsharded_accumulated_grad"
"""From torch 2.15 on a property: the gradient of the unsharded parameter."""
_PARAMETER_GROUP = (*_PENDING, "_post_forward_indices", "_training_state", "_to_sharded")


def fsdp_states(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each module that it has sharded."""
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is None or not hasattr(loaded, "FSDPModule"):
        return []
    return [one._get_fsdp_state() for one in model.modules() if isinstance(one, loaded.FSDPModule)]


def check_fsdp(states: Iterable[Any]) -> None:
    """Refuse an FSDP2 that could not be brought back after a lost step."""
    if not all(_can_reset(state) for state in states):
        raise UnknownTorch(
            f"torch {torch.__version__} lacks FSDPState._reset_iter_state and the attributes that "
            "TaskD needs to reset fully_shard after a lost step. Install a newer torch, or leave "
            "out protect() and let a fault restart the ranks from your own checkpoint"
        )


def reset_pipelines(has_run: bool) -> None:
    """Let every pipeline schedule of this process exchange shapes again, as at its first step.

    A new rank does that in its first step, and its neighbours must answer; and what an abandoned
    step has left in a stage is dropped. `has_run`: a step is committed that has done it before.
    """
    schedules = sys.modules.get(f"{_PIPELINING}.schedules")
    if schedules is None:
        return
    base = schedules._PipelineSchedule
    for schedule in [one for one in gc.get_objects() if issubclass(type(one), base)]:
        for name in vars(schedule):
            if name.startswith("_stage") and name.endswith("_initialized"):
                setattr(schedule, name, False)
        vars(schedule).get("_internal_losses", []).clear()
        for stage in vars(schedule).get("_stages", [vars(schedule).get("_stage")]):
            for cache in ("fwd_cache", "bwd_cache", "output_chunks"):
                vars(stage).get(cache, []).clear()
            if has_run and hasattr(stage.submod, "no_sync"):
                _infer_without_sync(stage)


def _infer_without_sync(stage: Any) -> None:
    """The next pass that only finds out shapes leaves no trace in DDP.

    It would make DDP reduce the gradients of the first microbatch by themselves, which gives the
    same sums with other last bits.
    """
    inherited = type(stage)._prepare_forward_infra

    def prepare(*args: Any, **kwargs: Any) -> Any:
        vars(stage).pop("_prepare_forward_infra", None)
        with stage.submod.no_sync():
            return inherited(stage, *args, **kwargs)

    stage._prepare_forward_infra = prepare


def reset_fsdp(state: Any) -> None:
    """Bring FSDP2 back to where it is between two steps, wherever it was interrupted."""
    if state._is_root:  # known since its first pass; before that there is nothing to forget
        _reset(state)
    for group in _parameter_groups(state):
        for one in group.fsdp_params:
            if not isinstance(getattr(type(one), _ACCUMULATED, None), property):
                setattr(one, _ACCUMULATED, None)
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None


def has_unreduced_gradients(state: Any) -> bool:
    """Whether FSDP2 keeps gradients of the whole parameters, which are not in the shards."""
    return any(
        getattr(one, _ACCUMULATED, None) is not None
        or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        for group in _parameter_groups(state)
        for one in group.fsdp_params
    )


def _can_reset(state: Any) -> bool:
    if hasattr(state, "_reset_iter_state"):
        return True
    if not all(hasattr(state, name) for name in ("_state_ctx", "_comm_ctx", "_fsdp_param_group")):
        return False
    owners = [
        (state._state_ctx, _ITERATION),
        *((group, _PARAMETER_GROUP) for group in _parameter_groups(state)),
    ]
    return all(hasattr(owner, name) for owner, names in owners for name in names)


def _parameter_groups(state: Any) -> list[Any]:
    """The parameters that are gathered together: one group per module in older versions."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset(root: Any) -> None:
    """As if the iteration had not begun. Its results are not used any more."""
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    idle = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"].TrainingState.IDLE
    shared = root._comm_ctx
    shared.all_gather_state = shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _parameter_groups(state):
            for name in _PENDING:
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
