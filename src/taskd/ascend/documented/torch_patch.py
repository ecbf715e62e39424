"""The documented names behind `import taskd.python.adaptor.patch`.

`patch_torch_method` is what the import calls: it lets torchrun use TaskD's agent
(`taskd.agent.seams.torchrun`). The others are for programs that give torch's own agent workers
that can be started and stopped one by one (`taskd.agent.seams.torchrun_contexts`).
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
from taskd.config import environ


def patch_torch_method() -> None:
    """Let torchrun use TaskD's agent. Without torch, or with a torch that is not known, nothing."""
    if find_spec("torch") is None:
        return
    from taskd.agent.seams.torchrun import install

    install()


def patch_invoke_run(self: Any, role: str = "default") -> Any:
    """Run this agent's workers under TaskD; without a manager, as torch would."""
    from taskd.agent.seams.torchrun import ElasticAgent

    if not isinstance(self, ElasticAgent):
        self.__class__ = ElasticAgent
    return self._invoke_run(role)


def patch_default_signal() -> signal.Signals:
    """What ends a worker that does not matter any more."""
    return signal.SIGKILL


def patch_launch_agent(config: Any, entrypoint: Any, args: list[Any]) -> Any:
    """Torch's own, where no number of restarts means any number."""
    from taskd.agent.seams.torchrun import TORCHS_LAUNCH

    if not config.max_restarts:
        config = replace(config, max_restarts=UNLIMITED_RESTARTS)
    return TORCHS_LAUNCH(config, entrypoint, args)


def patch_create_c10d_store_decorator(
    func: Callable[..., Iterator[Any]],
) -> Callable[..., Iterator[Any]]:
    """For torch's `rendezvous`: each attempt of the workers has keys of its own in the store."""

    @wraps(func)
    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
        from torch._C._distributed_c10d import PrefixStore

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
    """How the one worker of this context has ended; None: it runs."""
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.glance(pcontext)


def get_worker_env(self: Any, worker_group: Any, worker: Any) -> dict[str, str]:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.environment(self, worker_group, worker)


def get_use_agent_store(spec: Any) -> bool:
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.uses_agent_store(spec.rdzv_handler)


def start_processes_with_logs_spec(
    self: Any, worker_group: Any, worker: Any, env: dict[str, str], logs_specs: Any
) -> Any:
    """The process context of one worker, with these log settings."""
    from taskd.agent.seams import torchrun_contexts as contexts

    return contexts.begin(self, worker_group, worker, env, logs_specs)


def start_processes_with_log_dir(
    self: Any, worker_group: Any, worker: Any, env: dict[str, str], log_dir: str
) -> Any:
    """The same with a folder: its files are made anew, unless it is somebody's link."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from taskd.agent.seams import torchrun_contexts as contexts

    if os.path.islink(log_dir):
        raise ValueError(f"{log_dir} is a link: logs are not written through it")
    os.makedirs(log_dir, exist_ok=True)
    logs = DefaultLogsSpecs(log_dir=log_dir)
    return contexts.begin(self, worker_group, worker, env, logs)
