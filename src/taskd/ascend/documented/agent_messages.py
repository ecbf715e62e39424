"""Messages between agents and the manager, as the documented Python layer has them.

`AgentMessageManager` is an agent's endpoint on the bus, one per process: received messages go to a
queue as `MsgBody`; a send waits for the acknowledgement and tries again without one. The bus itself
is in `taskd.bus.endpoint`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented.run_log import run_log
from taskd.bus.endpoint import Bus, BusConfig
from taskd.bus.security import membership
from taskd.config import environ
from taskd.errors import Permanent
from taskd.model import ids
from taskd.model.messages import Unknown
from taskd.runtime.loop_thread import LoopThread
from taskd.wire.bus_bodies import InvalidBody, decode, encode
from taskd.wire.json_reading import loads

LOCAL_HOST = "127.0.0.1"

CONFIG_UPSTREAMIP_KEY = "UpstreamAddr"
CONFIG_LISTENIP_KEY = "ListenAddr"
CONFIG_UPSTREAMPORT_KEY = "UpstreamPort"
CONFIG_LISTENPORT_KEY = "ListenPort"
CONFIG_ROLE_KEY = "Role"
CONFIG_SERVERRANK_KEY = "ServerRank"
CONFIG_PROCESSRANK_KEY = "ProcessRank"
CONFIG_FRAMEWORK_KEY = "Framework"

DEFAULT_PROXY_UPSTREAMPORT = "9601"
DEFAULT_PRXOY_LISTENPORT = "9602"
"""Misspelled as in MindCluster: other programs import this name."""
DEFAULT_AGENT_UPSTREAMPORT = "9602"
DEFAULT_PROXY_ROLE = "Proxy"
DEFAULT_AGENT_ROLE = "Agent"
DEFAULT_SERVERRANK = "0"
DEFAULT_PROCESSRANK = "-1"
DEFAULT_BIZTYPE = "DEFAULT"


@dataclass
class Position:
    role: str
    server_rank: str
    process_rank: str


@dataclass
class TLSConfig:
    ca: str
    server_key: str
    server_crt: str
    client_key: str
    client_crt: str


@dataclass
class NetworkConfig:
    pos: Position
    upstream_addr: str
    listen_addr: str
    enable_tls: bool
    tls_conf: TLSConfig | None


@dataclass
class MessageInfo:
    uuid: str
    biz_type: str
    dst: Position
    body: str


@dataclass
class MsgBody:
    msg_type: str
    code: int
    message: str
    extension: dict[str, str]


@dataclass
class AgentReportInfo:
    fault_ranks: list[int] = field(default_factory=list)
    restart_times: int = -1


DEFAULT_DST = Position(role="Mgr", server_rank="0", process_rank="-1")
SEEN_LIMIT = 10_000
"""How many received messages are remembered, to drop repetitions."""


class AgentMessageManager:
    instance: AgentMessageManager | None = None

    def __init__(
        self, network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
    ) -> None:
        if network_config is None or msg_queue is None:
            raise ValueError("network_config and msg_queue are required, got None")
        self.rank = int(network_config.pos.server_rank)
        self.msg_queue = msg_queue
        self._log: logging.Logger = logger
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._thread = LoopThread("taskd-agent")
        self._network_instance = self._thread.run(self._open(network_config)).result()
        AgentMessageManager.instance = self

    async def _open(self, config: NetworkConfig) -> Bus:
        me = ids.Position(config.pos.role, config.pos.server_rank, config.pos.process_rank)
        job, token = membership(environ)
        upstream = config.upstream_addr
        bus = Bus(BusConfig(me=me, upstream=upstream, job=job, token=token, mtype=DEFAULT_BIZTYPE))
        await bus.start()
        return bus

    def get_network_instance(self) -> Bus:
        return self._network_instance

    def register(self, rank: str) -> None:
        """Register this agent with the manager."""
        body = MsgBody(msg_type="REGISTER", code=0, message="", extension={})
        text = json.dumps(body.__dict__)
        self.send_message(MessageInfo(str(uuid.uuid4()), DEFAULT_BIZTYPE, DEFAULT_DST, text))

    def send_message(self, message: MessageInfo, code: int = 0) -> bool:
        """Send the message, with a few attempts. True: it was delivered."""
        try:
            body = decode(message.body, "Agent")
        except InvalidBody as problem:
            self._log.error("message %s is not sent: %s", message.uuid, problem)
            return False
        dst = ids.Position(message.dst.role, message.dst.server_rank, message.dst.process_rank)
        for _ in range(constants.SEND_RETRY_TIMES):
            sending = self._network_instance.send(dst, body, uuid=message.uuid)
            sent = self._thread.run(sending).result()
            if sent:
                return True
            self._log.warning("message %s was not delivered: %s", message.uuid, sent.code.sentence)
        return False

    def receive_message(self) -> None:
        """Put every received message into the queue, once. Blocks until this is closed."""
        while True:
            try:
                received = self._thread.run(self._network_instance.receive_order()).result()
            except (CancelledError, Permanent):
                return
            if received.uuid in self._seen:
                continue
            self._seen[received.uuid] = None
            if len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)
            fields = loads(encode(received.body))
            body = received.body
            extension = body.extension if isinstance(body, Unknown) else fields["extension"]
            self.msg_queue.put(
                MsgBody(
                    fields["msg_type"], fields["code"], fields["message"], dict(extension or {})
                )
            )

    def close(self) -> None:
        self._thread.run(self._network_instance.close()).result()
        self._thread.stop()
        AgentMessageManager.instance = None


def init_network_client(
    network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
) -> threading.Thread:
    """Run `init_message_manager` in a daemon thread."""
    thread = threading.Thread(
        target=init_message_manager, args=(network_config, msg_queue, logger), daemon=True
    )
    thread.start()
    return thread


def init_message_manager(
    network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
) -> None:
    """Join the bus, register, and receive messages. Blocks until the connection is closed."""
    if network_config is None or msg_queue is None or logger is None:
        raise ValueError("network_config, msg_queue and logger are required, got None")
    manager = AgentMessageManager(network_config, msg_queue, logger)
    manager.register(network_config.pos.server_rank)
    manager.receive_message()


def get_message_manager() -> AgentMessageManager | None:
    return AgentMessageManager.instance


def get_msg_network_instance() -> Bus | None:
    manager = get_message_manager()
    return None if manager is None else manager.get_network_instance()


def network_send_message(msg: MessageInfo, code: int = 0) -> None:
    manager = get_message_manager()
    if manager is None:
        run_log.warning("message %s is dropped: the network is not initialised yet", msg.uuid)
        return
    manager.send_message(msg, code)
