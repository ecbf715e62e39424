"""Torch's own agent with one process context per worker, to start and stop workers one by one.

For programs that drive torch's agent themselves through the documented functions
(`pytorch_callbacks.py`), under the names of `taskd.python.adaptor.patch.torch_patch`. The seam to
torchrun (`torchrun.py`) does not need it: its workers come from a zygote.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, to_map
from torch.distributed.elastic.utils.api import macros

from taskd.agent.seams import torch_names
from taskd.config import environ

CONTEXTS, ENVIRONMENTS = "_pcontext_dict", "_envs"
"""The attributes where the agent keeps them, by local rank."""
PASSED_ON = {
    "NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "RESTART_FAULT_PROCESS_TYPE": "pod",
}


def start(agent: Any, group: WorkerGroup) -> dict[int, int]:
    """Start these workers, each in its own context; returns their pids by local rank."""
    contexts, envs = _of(agent, CONTEXTS), _of(agent, ENVIRONMENTS)
    for worker in group.workers:
        rank = worker.local_rank
        envs[rank] = environment(agent, group, worker)
        contexts[rank] = begin(agent, group, worker, envs[rank], _logs(agent, group, rank))
    torch_names.start_watchdog(agent, envs)
    return {worker.local_rank: pid_of(contexts[worker.local_rank]) for worker in group.workers}


def stop(agent: Any, group: WorkerGroup) -> None:
    """Kill these workers at the same time, and wait until they are gone."""
    torch_names.stop_watchdog(agent)
    contexts = _of(agent, CONTEXTS)
    stopping = [contexts.pop(w.local_rank) for w in group.workers if w.local_rank in contexts]
    _in_parallel(end, stopping)


def restart(agent: Any, group: WorkerGroup) -> None:
    """Stop and start these workers; the other workers of the group are not affected."""
    stop(agent, group)
    group.state = WorkerState.STOPPED
    whole = {worker.local_rank: worker for worker in torch_names.worker_group(agent).workers}
    for rank, pid in start(agent, group).items():
        whole[rank].id = pid
    group.state = WorkerState.HEALTHY


def monitor(agent: Any, group: WorkerGroup) -> RunResult:
    """The state of these workers, by global rank."""
    contexts, workers = _of(agent, CONTEXTS), {w.local_rank: w for w in group.workers}
    running = {rank: context for rank, context in contexts.items() if rank in workers}
    expected = {rank: worker.id for rank, worker in workers.items()}
    if expected != {rank: pid_of(context) for rank, context in running.items()}:
        return RunResult(state=WorkerState.UNKNOWN)
    results = dict(zip(running, _in_parallel(poll, running.values()), strict=True))
    failures, values = {}, {}
    for rank, result in results.items():
        if result is not None and result.is_failed():
            failures[workers[rank].global_rank] = result.failures[0]
        elif result is not None:
            values[workers[rank].global_rank] = result.return_values.get(0)
    if failures:
        return RunResult(state=WorkerState.FAILED, failures=failures)
    if len(values) == len(workers):
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
    return RunResult(state=WorkerState.HEALTHY)


def environment(agent: Any, group: WorkerGroup, worker: Any) -> dict[str, str]:
    """The variables of one worker, torchrun's and Ascend's."""
    spec = group.spec
    env = {
        "LOCAL_RANK": worker.local_rank,
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": getattr(group, "master_addr", None) or environ.get("MASTER_ADDR", ""),
        "MASTER_PORT": getattr(group, "master_port", None) or environ.get("MASTER_PORT", ""),
        "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - torch_names.remaining_restarts(agent),
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": uses_agent_store(spec.rdzv_handler),
        **{name: environ.get(name, default) for name, default in PASSED_ON.items()},
    }
    if (threads := environ.get("OMP_NUM_THREADS")) is not None:
        env["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in env.items()}


def uses_agent_store(handler: Any) -> bool:
    return bool(getattr(handler, "use_agent_store", handler.get_backend() == "static"))


def begin(
    agent: Any, group: WorkerGroup, worker: Any, env: dict[str, str], logs: DefaultLogsSpecs
) -> PContext:
    """One process, number 0 of its context."""
    spec: Any = group.spec
    words = tuple(macros.substitute(list(spec.args), str(worker.local_rank)))
    template = torch_names.log_line_prefix_template(agent)
    names = {"role_name": spec.role, "rank": worker.global_rank, "local_rank": worker.local_rank}
    options: dict[str, Any] = {
        "log_line_prefixes": {0: Template(template).safe_substitute(names)} if template else None,
        "start_method": torch_names.start_method(agent),
        "numa_options": getattr(spec, "numa_options", None),
        "duplicate_stdout_filters": getattr(spec, "duplicate_stdout_filters", None),
        "duplicate_stderr_filters": getattr(spec, "duplicate_stderr_filters", None),
    }
    known = inspect.signature(start_processes).parameters  # torch 2.6 has fewer
    return start_processes(
        spec.role,
        spec.entrypoint,
        {0: words},
        {0: env},
        logs,
        **{name: value for name, value in options.items() if name in known},
    )


def end(context: PContext) -> None:
    context.close(signal.SIGKILL)


def poll(context: PContext) -> RunProcsResult | None:
    """None: it runs."""
    return context.wait(0)


def pid_of(context: PContext) -> int:
    return int(context.pids()[0])


def _logs(agent: Any, group: WorkerGroup, rank: int) -> DefaultLogsSpecs:
    """The agent's log settings for this one worker, which is number 0 of its own context."""
    size = group.spec.local_world_size
    root, redirects, tee, shown = torch_names.log_settings(torch_names.logs_specs(agent))
    return DefaultLogsSpecs(
        log_dir=os.path.join(root, str(rank)) if root else None,
        redirects=to_map(redirects, size)[rank],
        tee=to_map(tee, size)[rank],
        local_ranks_filter=None if shown is None else ({0} if rank in shown else {-1}),
    )


def _of(agent: Any, name: str) -> dict[int, Any]:
    if not hasattr(agent, name):
        setattr(agent, name, {})
    found: dict[int, Any] = getattr(agent, name)
    return found


def _in_parallel(work: Any, contexts: Iterable[PContext]) -> list[Any]:
    """Each call may take a while, and the contexts are independent."""
    each = list(contexts)
    with ThreadPoolExecutor(max_workers=max(1, len(each))) as pool:
        return list(pool.map(work, each))
