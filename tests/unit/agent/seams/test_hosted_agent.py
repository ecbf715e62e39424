"""The settings of an agent that runs inside torchrun or msrun."""

from __future__ import annotations

from taskd.agent.seams.hosted_agent import AgentConfig
from taskd.core.agent.states import WorkersConfig


def test_finished_node_does_not_wait_long_for_an_order_that_ascends_manager_never_sends() -> None:
    workers = AgentConfig(farewell_s=3.0).workers
    assert workers == WorkersConfig(farewell_s=3.0, in_ascends_words=True)
    assert AgentConfig().workers.farewell_s == 10.0
