"""The functions behind `import taskd.python.adaptor.patch` and `import mindx_elastic.api`.

The first import calls `patch_torch_method`, the second `patch_torch_methods`: both make torchrun
use TaskD's agent (`taskd.agent.seams.torchrun`). The other functions are for programs that keep
torch's own agent but start and stop its workers one by one
(`taskd.agent.seams.torchrun_contexts`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from typing import Any

from taskd.agent.run.plan import UNLIMITED_RESTARTS
from taskd.agent.seams import torch_names
from taskd.config import environ
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every

ELASTIC_START_S = 60.0
"""How long the Elastic Agent waits for the reset files before it starts the workers anyway."""


def patch_torch_method() -> None:
    """Make torchrun use TaskD's agent. Does nothing without torch or with an unknown version."""
    if find_spec("torch") is None:
        return
    from taskd.agent.seams.torchrun import install

    install()


def patch_torch_methods() -> None:
    """The Elastic Agent's function: the same, but torch is required.

    If ELASTIC_PROCESS_RECOVER_ENABLE is set to anything but 1, torchrun stays as it is.
    """
    if find_spec("torch") is None:
        raise ImportError(
            "mindx_elastic.api changes how torch starts its workers, and torch is not installed"
        )
    enabled = environ.get("ELASTIC_PROCESS_RECOVER_ENABLE", "1")
    if enabled != "1":
        from taskd.ascend.documented.elastic_log import run_log

        run_log.warning(
            "torchrun is not patched: ELASTIC_PROCESS_RECOVER_ENABLE is %r, not 1", enabled
        )
        return
    patch_torch_method()
    _patch_elastic_agent()


def _patch_elastic_agent() -> None:
    """Replace the three functions of torch that the Elastic Agent's page names."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.launcher import api as launcher

    torch_names.replace_run_and_initialize(
        SimpleElasticAgent, patch_invoke_run, patch_initialize_workers
    )
    setattr(launcher, "launch_agent", patch_launch_agent)  # noqa: B010 - its signature varies


def patch_initialize_workers(self: Any, worker_group: Any) -> None:
    """torch's `_initialize_workers`, once the reset files list no fault of this node."""
    from taskd.agent.seams.torchrun import TORCHS_INITIALIZE
    from taskd.ascend.documented import agent_constants as constants
    from taskd.ascend.documented.elastic_log import run_log
    from taskd.ascend.documented.reset_files import fault_processor

    deadline = monotonic() + ELASTIC_START_S
    waits = Tries(every(constants.WAITING_INTERVAL), deadline=deadline)
    if not any(fault_processor.wait_to_start(worker_group) for _ in waits):
        run_log.warning("the workers start although the reset files still list their faults")
    TORCHS_INITIALIZE(self, worker_group)


def patch_invoke_run(self: Any, role: str = "default") -> Any:
    """Run this agent's workers under TaskD; without a manager, run them as torch does."""
    from taskd.agent.seams.torchrun import ElasticAgent

    if not isinstance(self, ElasticAgent):
        self.__class__ = ElasticAgent
    return torch_names.invoke_run(self, role)


def patch_default_signal() -> signal.Signals:
    """The signal that ends a worker that is no longer needed."""
    return signal.SIGKILL


def patch_launch_agent(config: Any, entrypoint: Any, args: list[Any], **more: Any) -> Any:
    """torch's `launch_agent`, where max_restarts=0 means an unlimited number of restarts.

    `more`: what newer versions of torch pass, for example a health check server.
    """
    from taskd.agent.seams.torchrun import TORCHS_LAUNCH

    if not config.max_restarts:
        config = replace(config, max_restarts=UNLIMITED_RESTARTS)
    return TORCHS_LAUNCH(config, entrypoint, args, **more)


def patch_create_c10d_store_decorator(
    func: Callable[..., Iterator[Any]],
) -> Callable[..., Iterator[Any]]:
    """For torch's `rendezvous`: each attempt of the workers uses its own keys in the store."""

    @wraps(func)
    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
        from torch.distributed import PrefixStore

        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        for store, rank, size in func(*args, **kwargs):
            yield PrefixStore(f"/worker/attempt_{attempt}", store), rank, size

    return rendezvous


def patch_start_workers(self: Any, worker_group: Any) -> dict[int, int]:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.start(self, worker_group)


def patch_stop_workers(self: Any, worker_group: Any, is_restart: bool = False) -> None:
    from taskd.agent.seams import torchrun_contexts as contexts

    contexts.stop(self, worker_group)


def patch_restart_workers(self: Any, worker_group: Any) -> None:
    from taskd.agent.seams import torchrun_contexts as contexts

    contexts.restart(self, worker_group)


def patch_monitor_workers(self: Any, worker_group: Any) -> Any:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.monitor(self, worker_group)


def stop_worker_task(pcontext: Any) -> None:
    """Kill the one worker of this context."""
    from taskd.agent.seams import torchrun_contexts as contexts

    contexts.end(pcontext)


def context_wait_task(pcontext: Any) -> Any:
    """How the one worker of this context has ended; None: it still runs."""
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.poll(pcontext)


def get_worker_env(self: Any, worker_group: Any, worker: Any) -> dict[str, str]:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.environment(self, worker_group, worker)


def get_use_agent_store(spec: Any) -> bool:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.uses_agent_store(spec.rdzv_handler)


def start_processes_with_logs_spec(
    self: Any, worker_group: Any, worker: Any, env: dict[str, str], logs_specs: Any
) -> Any:
    """Start one worker with these log settings; returns its process context."""
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.begin(self, worker_group, worker, env, logs_specs)


def start_processes_with_log_dir(
    self: Any, worker_group: Any, worker: Any, env: dict[str, str], log_dir: str
) -> Any:
    """The same with a folder for the logs, whose files are replaced. A link is refused."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from taskd.agent.seams import torchrun_contexts as contexts

    if os.path.islink(log_dir):
        raise ValueError(f"the log directory {log_dir} is a symbolic link: use a real directory")
    os.makedirs(log_dir, exist_ok=True)
    logs = DefaultLogsSpecs(log_dir=log_dir)
    return contexts.begin(self, worker_group, worker, env, logs)
