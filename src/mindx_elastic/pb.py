"""Documented import path of the Elastic Agent's messages."""

from taskd.ascend.documented.elastic_agent import ClientInfo
from taskd.wire._pb.recover_pb2 import Status

__all__ = ["ClientInfo", "Status"]
