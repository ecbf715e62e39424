"""Behind `init_taskd_agent`, `register_func` and `start_taskd_agent`: one agent per process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Protocol

from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.runtime.log import also_to, attach

log = logging.getLogger(__name__)

PYTORCH, MINDSPORE = "PyTorch", "MindSpore"
_RANK_NAMES = {PYTORCH: "RANK", MINDSPORE: "MS_NODE_RANK"}


class _Agent(Protocol):
    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None: ...
    def start(self) -> Any: ...


_agent: _Agent | None = None


def init(config: Mapping[str, Any], cls: Any = None) -> bool:
    """Prepare the agent of this process. False: it was refused, and the log says why."""
    global _agent
    attach()
    if not isinstance(config, Mapping):
        return _refuse(f"the settings must be a dict, got {type(config).__name__}")
    framework = config.get("Framework")
    if framework not in tuple(_RANK_NAMES):
        return _refuse(f"Framework must be {PYTORCH} or {MINDSPORE}, got {framework!r}")
    if framework == PYTORCH and cls is None:
        return _refuse("for PyTorch, pass torch's agent as the second argument")
    if framework == MINDSPORE and environ.get("TASKD_PROCESS_ENABLE") == "off":
        return _refuse("TASKD_PROCESS_ENABLE is off: MSRunPlugin runs the job without a manager")
    named = environ.get(_RANK_NAMES[framework]) or "0"
    if not _is_number(named):
        return _refuse(f"{_RANK_NAMES[framework]} must be a number, got {named!r}")
    rank = str(config.get("ServerRank") or named)
    address, port = config.get("UpstreamAddr"), str(config.get("UpstreamPort") or "9602")
    if not _is_number(rank) or not _is_number(port):
        return _refuse(f"ServerRank and UpstreamPort must be numbers, got {rank!r}, {port!r}")
    if not 0 < int(port) < 65536:
        return _refuse(f"UpstreamPort must be between 1 and 65535, got {port}")
    if address is not None and not _is_address(address):
        return _refuse(f"UpstreamAddr must be an IP address, got {address!r}")
    also_to(f"agent-{rank}.log")
    upstream = f"{address}:{port}" if address else ""
    if framework == PYTORCH:
        from taskd.agent.seams.pytorch_callbacks import PtAgent

        _agent = PtAgent(cls, int(rank), upstream)
    else:
        from taskd.agent.seams.hosted_agent import AgentConfig
        from taskd.agent.seams.msrun import MsAgent

        manager = environ.get("MS_SCHED_HOST") or "127.0.0.1"
        try:
            settings = load(AgentConfig, environ, prefix="TASKD_AGENT")
        except SettingsError as error:
            return _refuse(str(error))
        _agent = MsAgent(replace(settings, node=int(rank), upstream=upstream, manager=manager))
    return True


def register(operator: str, func: Callable[..., Any]) -> bool:
    if _agent is None:
        return _refuse("call init_taskd_agent before register_func")
    if not callable(func):
        return _refuse(f"the callback for {operator} must be a function, got {func!r}")
    _agent.register_callbacks(operator, func)
    return True


def start() -> Any:
    """Run the node's part of the job; blocks until it ends. None: there is no agent."""
    if _agent is None:
        _refuse("call init_taskd_agent before start_taskd_agent")
        return None
    return _agent.start()


def _refuse(reason: str) -> bool:
    log.error("agent refused the call: %s", reason)
    return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_address(text: object) -> bool:
    try:
        ip_address(str(text).strip("[]"))
    except ValueError:
        return False
    return True
