"""Every private name of torch that the launcher's side uses, behind one accessor each.

A training process has its own tables, `torch/compat/`. This one is separate for two reasons: a
rank must not spend time importing `torch.distributed.elastic`, and an agent must not import
`taskd.torch`, which puts a hook behind all optimizers. Nothing of torch is imported here before an
accessor is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from taskd.runtime.private_names import PrivateName, check_torch

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_LOGS = "torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"
_WORLD = "torch.distributed.distributed_c10d:_World"

TORCHRUN = (
    PrivateName(
        "torch.distributed.launcher.api",
        "LocalElasticAgent",
        "giving torchrun an agent that reports to the manager",
    ),
    PrivateName(_AGENT, "_invoke_run", "running the workers of a node"),
    PrivateName(_AGENT, "_initialize_workers", "starting workers once the node's faults are over"),
    PrivateName(_AGENT, "_rendezvous", "learning the ranks of a node"),
    PrivateName(_AGENT, "_worker_group", "learning the ranks of a node"),
    PrivateName(_AGENT, "_remaining_restarts", "telling the workers how often they were restarted"),
    PrivateName(_AGENT, "_logs_specs", "writing the workers' logs where torchrun would"),
    PrivateName(_LOGS, "_root_log_dir", "writing the workers' logs where torchrun would"),
    PrivateName(_LOGS, "_redirects", "writing the workers' logs where torchrun would"),
    PrivateName(_LOGS, "_tee", "writing the workers' logs where torchrun would"),
    PrivateName(_LOGS, "_local_ranks_filter", "writing the workers' logs where torchrun would"),
)
"""For torchrun's own agent, replaced or driven through the documented functions."""

CONTEXTS = (
    PrivateName(_AGENT, "_setup_local_watchdog", "starting workers one by one"),
    PrivateName(_AGENT, "_worker_watchdog", "stopping workers one by one"),
    PrivateName(_AGENT, "_start_method", "starting workers one by one"),
    PrivateName(_AGENT, "_pcontext", "reading how a worker has ended"),
)
"""For programs that start and stop torch's workers one by one (`torchrun_contexts.py`)."""

STORE = (
    PrivateName(
        "torch.distributed.rendezvous",
        "_create_c10d_store",
        "giving every restart attempt its own keys in the store",
    ),
)
"""For the zygote."""

GROUPS = (
    PrivateName(_WORLD, "pg_group_ranks", "writing down the process groups"),
    PrivateName(_WORLD, "pg_names", "writing down the process groups"),
    PrivateName(_WORLD, "default_pg", "writing down the process groups"),
    PrivateName(
        "torch.distributed:ProcessGroup", "_get_backend", "writing down the process groups"
    ),
)
"""For `ascend/documented/group_dump.py`."""


def check(table: Iterable[PrivateName]) -> None:
    """Raise UnknownTorch if the installed torch lacks a name of this table."""
    check_torch(table)


# torchrun's agent


def invoke_run(agent: Any, role: str) -> Any:
    return agent._invoke_run(role)


def run_and_initialize(agent_class: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods that run a node's workers and that start them."""
    return agent_class._invoke_run, agent_class._initialize_workers


def replace_run_and_initialize(
    agent_class: Any, invoke_run: Callable[..., Any], initialize_workers: Callable[..., Any]
) -> None:
    agent_class._invoke_run = invoke_run
    agent_class._initialize_workers = initialize_workers


def rendezvous(agent: Any) -> None:
    """Block until the node knows its ranks."""
    agent._rendezvous(agent._worker_group)


def worker_group(agent: Any) -> Any:
    return agent._worker_group


def remaining_restarts(agent: Any) -> int:
    return int(agent._remaining_restarts)


def logs_specs(agent: Any) -> Any:
    return agent._logs_specs


def log_settings(specs: Any) -> tuple[str, Any, Any, Any]:
    """Root folder, redirects, tee and the local ranks that are shown (None: all)."""
    root = str(specs._root_log_dir or "")
    return root, specs._redirects, specs._tee, specs._local_ranks_filter


def log_line_prefix_template(agent: Any) -> str | None:
    """None as well in a torch that has no such option."""
    return getattr(agent, "_log_line_prefix_template", None)


def shutdown_timeout_s(agent: Any, default: float) -> float:
    """The default in a torch that has no such option."""
    return float(getattr(agent, "_shutdown_timeout", default))


def start_method(agent: Any) -> str:
    return str(agent._start_method)


def start_watchdog(agent: Any, environments: dict[int, dict[str, str]]) -> None:
    agent._setup_local_watchdog(envs=environments)


def stop_watchdog(agent: Any) -> None:
    if agent._worker_watchdog is not None:
        agent._worker_watchdog.stop()
        agent._worker_watchdog = None


def exit_codes(agent: Any) -> dict[int, int | None]:
    """How each process of the agent's context has ended, by local rank; None: it runs."""
    started = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
    return {local: handler.proc.returncode for local, handler in started.items()}


# The store


def wrap_store_creation(wrap: Callable[[Any], Any]) -> None:
    """Pass every store that torch's `env://` rendezvous creates through `wrap`."""
    check(STORE)
    module: Any = import_module("torch.distributed.rendezvous")
    create = module._create_c10d_store

    def create_wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrap(create(*args, **kwargs))

    module._create_c10d_store = create_wrapped


# Process groups


def registered_groups() -> Iterator[tuple[Any, dict[int, int], str, bool]]:
    """Each group of this process, its ranks, its name, and whether it is the default one."""
    check(GROUPS)
    from torch.distributed import distributed_c10d as c10d

    world: Any = c10d._world
    for group, ranks in world.pg_group_ranks.items():
        yield group, ranks, world.pg_names.get(group, ""), group is world.default_pg


def backend_of(group: Any, device: str) -> Any:
    import torch

    return group._get_backend(torch.device(device))
