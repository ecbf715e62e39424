"""Documented import path of `taskd.ascend.documented.agent_network`."""

from taskd.ascend.documented.agent_network import (
    DEFAULT_DST,
    MOST_SEEN,
    AgentMessageManager,
    get_message_manager,
    get_msg_network_instance,
    init_message_manager,
    init_network_client,
    network_send_message,
)

__all__ = [
    "DEFAULT_DST",
    "MOST_SEEN",
    "AgentMessageManager",
    "get_message_manager",
    "get_msg_network_instance",
    "init_message_manager",
    "init_network_client",
    "network_send_message",
]
