"""Every private name of torch that a training process relies on, behind one accessor each.

One module per subject has the names in a table, and next to it the functions that use them. The
rest of TaskD calls these functions only, as `compat.default_store()`; a test fails when any other
module touches a private name of torch.

`check` looks for the names once, in `taskd.torch.init()`, before anything is built on them: a torch
that lacks one is refused there with the name (`UnknownTorch`), not later with an AttributeError in
the middle of a repair. Names that not every job needs are checked when they are first needed:
their modules take seconds to import, and a script without them must not pay. The launcher's
private names are in `agent/seams/torch_names.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from taskd.errors import UnknownTorch
from taskd.runtime.private_names import Find, check_torch, find_owner
from taskd.runtime.torch_versions import supported_torch
from taskd.torch.compat import (
    backends,
    compiler,
    ddp,
    distributed_checkpoint,
    fsdp,
    loaders,
    pipelines,
    process_groups,
    recording,
    tensors,
)
from taskd.torch.compat.backends import (
    backend_options,
    backend_type,
    gloo_options,
    leave_out_of_flight_recorder,
    nccl_options,
    plugins,
    replace_symmetric_memory,
    start_sequence,
)
from taskd.torch.compat.compiler import (
    compile_in_process,
    has_compiled,
    trace_and_forget,
)
from taskd.torch.compat.ddp import (
    broadcast_coalesced,
    hooks_of,
    rebuild_buckets,
    rebuild_reducer,
)
from taskd.torch.compat.distributed_checkpoint import (
    check_checkpoints,
    check_sharded,
    checkpoint_coordinator,
    checkpoint_names,
    forget_checkpoint_plans,
    local_tensor,
    no_checkpoint,
    shard_place,
    wrap_checkpoint_collectives,
    wrap_checkpoint_save,
    wrap_checkpoint_thread,
)
from taskd.torch.compat.fsdp import (
    check_fsdp,
    fsdp_states,
    has_unreduced_gradients,
    reset_fsdp,
)
from taskd.torch.compat.loaders import (
    check_data,
    default_store,
    iterates_as_data_loader,
)
from taskd.torch.compat.pipelines import (
    check_pipelines,
    reset_pipelines,
)
from taskd.torch.compat.process_groups import (
    all_gather_into,
    backend_of,
    check_p2p_ops,
    coalescing_manager,
    default_group,
    device_for_objects,
    end_coalescing,
    forget_coalescing,
    group_helper,
    name_group,
    register_backend,
    sequence_number,
    set_default_backend,
    set_group_helper,
    set_group_ranks,
    source_rank,
    start_coalescing,
)
from taskd.torch.compat.recording import (
    argument_positions,
    below_autograd,
    check_profiling,
    data_loader_iterator,
    remove_kernels,
)
from taskd.torch.compat.tensors import (
    buffers_of,
    copy_all,
    forget_scaler_step,
    scaler_state,
    set_scaler_state,
    version,
    version_of,
    versions,
)

EVERY_JOB = (
    *process_groups.NAMES,
    *backends.NAMES,
    *ddp.NAMES,
    *tensors.NAMES,
    *recording.NAMES,
)
"""Checked by `taskd.torch.init()`."""
SOME_JOBS = (
    *loaders.NAMES,
    *pipelines.NAMES,
    *distributed_checkpoint.SHARDED,
    *distributed_checkpoint.CHECKPOINTS,
    *fsdp.NAMES,
    *compiler.NAMES,
)
"""Checked when a job first needs them."""


def check(find: Find = find_owner) -> None:
    """Refuse a torch that lacks a name which every protected job needs."""
    if not dist.is_available():
        raise UnknownTorch(
            f"torch {torch.__version__} was built without torch.distributed, which TaskD needs. "
            f"Supported: {supported_torch()}, built with torch.distributed"
        )
    check_torch(EVERY_JOB, find)


@lru_cache(maxsize=1)
def check_once() -> None:
    """The same, once per process: a standby has done it when it becomes a replacement."""
    check()


def check_all(find: Find = find_owner) -> None:
    """Every name, whether or not the job will need it."""
    check(find)
    check_torch(SOME_JOBS, find)
