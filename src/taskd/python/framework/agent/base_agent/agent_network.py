"""Documented import path of an agent's endpoint on the bus."""

from taskd.ascend.documented.agent_messages import (
    AgentMessageManager,
    get_message_manager,
    get_msg_network_instance,
    init_message_manager,
    init_network_client,
    network_send_message,
)

__all__ = [
    "AgentMessageManager",
    "get_message_manager",
    "get_msg_network_instance",
    "init_message_manager",
    "init_network_client",
    "network_send_message",
]
