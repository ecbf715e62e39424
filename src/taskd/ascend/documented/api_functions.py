"""The agent, proxy and worker functions of `taskd.api`, and the class `Worker`.

Importing this module is cheap: each function loads what it needs when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from importlib import import_module
from typing import Any

from taskd.config import environ
from taskd.errors import TaskdError

AGENT = "taskd.agent.seams.agent_api"
WORKER = "taskd.worker.worker_api"
STEP_HOOKS = {"pt": "taskd.torch.profiling.optimizer_hook", "ms": "taskd.mindspore.callback_hook"}
"""Modules that, when loaded, install a hook at the end of the framework's steps."""


def _load(module: str) -> Any:
    """The module, or None if this installation lacks what it needs; the log has the reason."""
    try:
        return import_module(module)
    except ImportError as error:
        from taskd.ascend.documented.run_log import run_log

        run_log.error("%s cannot be used in this installation: %s", module, error)
        return None


# The agent


def init_taskd_agent(config: Mapping[str, Any] | None = None, cls: Any = None) -> bool:
    """Prepare this node's agent for PyTorch (`cls`: torch's SimpleElasticAgent) or MindSpore.

    Only the key Framework is required; UpstreamAddr, UpstreamPort and ServerRank are optional.
    """
    agent = _load(AGENT)
    return agent is not None and bool(agent.init({} if config is None else config, cls))


def start_taskd_agent() -> Any:
    """Run the agent. The framework defines the result; None: the agent is not initialised."""
    agent = _load(AGENT)
    return None if agent is None else agent.start()


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """Register the agent's callback for KILL_WORKER, START_ALL_WORKER, MONITOR and so on."""
    agent = _load(AGENT)
    return agent is not None and bool(agent.register(operator, func))


# The proxy


def init_taskd_proxy(config: Mapping[str, Any] | None = None) -> bool:
    """Start this process's proxy, and wait without a time limit until it has joined the manager.

    All keys are optional: ListenAddr, ListenPort, UpstreamAddr, UpstreamPort, ServerRank, and
    for encryption enable_tls with tls_conf. A second call waits for the proxy that already runs.
    False: the settings are wrong, the port is in use (see the log), or the proxy was destroyed.
    """
    from taskd import proxy
    from taskd.ascend.documented.run_log import run_log
    from taskd.bus.security import tls_of

    try:
        given = {} if config is None else config
        settings = proxy.ProxyConfig.of(given, environ)
        return proxy.start(replace(settings, tls=tls_of(given)))
    except (AttributeError, TaskdError) as error:
        run_log.error("the proxy did not start: %s", error)
        return False


def destroy_taskd_proxy() -> bool:
    """Stop the proxy, even while it is still joining. True also if there is no proxy."""
    from taskd import proxy
    from taskd.ascend.documented.run_log import run_log

    try:
        proxy.stop()
    except (TaskdError, TimeoutError) as error:
        run_log.error("the proxy did not stop: %s", error)
        return False
    return True


# The worker


def init_taskd_worker(
    rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt"
) -> bool:
    """Prepare this training process for profiling, stress tests and link switches.

    False: an argument is not a number or is negative, or the environment does not contain the
    node's rank. `framework` is "pt" or "ms".
    """
    from taskd.ascend.documented.run_log import run_log

    try:
        rank = _natural("rank_id", rank_id)
        limit_mb = _natural("upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb)
        node = _node_rank(framework)
    except ValueError as error:
        run_log.error("the worker is not initialised: %s", error)
        return False
    worker = _load(WORKER)
    _load(STEP_HOOKS[framework])
    return worker is not None and bool(worker.init(rank, node, limit_mb, framework))


def start_taskd_worker() -> bool:
    """Start the worker in the background. False: it is not initialised."""
    worker = _load(WORKER)
    return worker is not None and bool(worker.start())


def destroy_taskd_worker() -> bool:
    """Leave the bus. False: the worker is not initialised."""
    worker = _load(WORKER)
    return worker is not None and bool(worker.destroy())


def _natural(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    return value


def _node_rank(framework: str) -> int:
    """torchrun sets the process's global rank; msrun sets the node's own rank."""
    match framework:
        case "ms":
            return _from_environment("MS_NODE_RANK")
        case "pt":
            local = _from_environment("LOCAL_WORLD_SIZE")
            if not local:
                raise ValueError("LOCAL_WORLD_SIZE must not be 0")
            return _from_environment("RANK") // local
        case _:
            raise ValueError(f"framework must be 'pt' or 'ms', got {framework!r}")


def _from_environment(name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text)


class StressStatus(Enum):
    """How a stress test of one rank ended, with the text that Ascend's manager reads."""

    OK = "0-OK"
    EXEC_FAIL = "1-exec failed"
    FIND_FAULT = "2-find fault rank"
    TIMEOUT = "3-exec timeout"
    VOLTAGE_RECOVERY_FAIL = "4-voltage recovery failed"


class Worker:
    """One rank, for code that already uses this class. New code calls `taskd.api` instead."""

    def __init__(self, global_rank: int, framework: str = "pt") -> None:
        self.global_rank, self.framework = global_rank, framework

    def init_worker(self, upper_limit_of_disk_in_mb: int = 5000) -> bool:
        return init_taskd_worker(self.global_rank, upper_limit_of_disk_in_mb, self.framework)

    def start(self) -> bool:
        return start_taskd_worker()

    def destroy(self) -> bool:
        return destroy_taskd_worker()
