"""`init_taskd_agent`, `start_taskd_agent` and `register_func`, on top of `taskd.agent`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from taskd.ascend.documented.lazy_import import behind

AGENT = "taskd.agent.seams.agent_api"


def init_taskd_agent(config: Mapping[str, Any] | None = None, cls: Any = None) -> bool:
    """Prepare this node's agent for PyTorch (`cls`: torch's SimpleElasticAgent) or MindSpore.

    Every key may be missing but Framework: UpstreamAddr, UpstreamPort, ServerRank.
    """
    agent = behind(AGENT)
    return agent is not None and bool(agent.init(dict(config or {}), cls))


def start_taskd_agent() -> Any:
    """Run the agent. What it returns is up to the framework; None if it was not initialised."""
    agent = behind(AGENT)
    return None if agent is None else agent.start()


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """Let the agent call this for KILL_WORKER, START_ALL_WORKER, MONITOR and so on."""
    agent = behind(AGENT)
    return agent is not None and bool(agent.register(operator, func))
