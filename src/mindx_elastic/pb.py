"""Documented import path of `taskd.ascend.elastic_agent.elastic_messages`."""

from taskd.ascend.elastic_agent.elastic_messages import (
    ClientInfo,
    Described,
    Status,
    to_wire,
)

__all__ = [
    "ClientInfo",
    "Described",
    "Status",
    "to_wire",
]
