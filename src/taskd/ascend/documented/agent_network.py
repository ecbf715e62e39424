"""An agent's place on the bus, as the documented Python layer offers it: one a process.

Messages arrive as `MsgBody` in a queue; sending waits for the receipt and tries again. Everything
else about the bus is `taskd.bus.endpoint`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import CancelledError
from typing import Any

from taskd.ascend.documented.message_types import (
    DEFAULT_BIZTYPE,
    MessageInfo,
    MsgBody,
    NetworkConfig,
    Position,
)
from taskd.ascend.toolkit import constants
from taskd.ascend.toolkit.run_log import run_log
from taskd.bus.endpoint import Bus, BusConfig
from taskd.bus.security import membership
from taskd.config import environ
from taskd.errors import Permanent
from taskd.model.ids import Position as Place
from taskd.model.messages import Unknown
from taskd.runtime.loop_thread import LoopThread
from taskd.wire.bus_bodies import NotABody, decode, encode

DEFAULT_DST = Position(role="Mgr", server_rank="0", process_rank="-1")
MOST_SEEN = 10_000
"""Messages whose repetition is noticed."""


class AgentMessageManager:
    instance: AgentMessageManager | None = None

    def __init__(
        self, network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
    ) -> None:
        if network_config is None or msg_queue is None:
            raise ValueError("the network's settings and a queue are needed")
        place = network_config.pos
        self.rank = int(place.server_rank)
        self.msg_queue = msg_queue
        self._log: logging.Logger = logger
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._thread = LoopThread("taskd-agent")
        self._network_instance = self._thread.run(self._open(network_config)).result()
        AgentMessageManager.instance = self

    async def _open(self, config: NetworkConfig) -> Bus:
        me = Place(config.pos.role, config.pos.server_rank, config.pos.process_rank)
        job, token = membership(environ)
        upstream = config.upstream_addr
        bus = Bus(BusConfig(me=me, upstream=upstream, job=job, token=token, mtype=DEFAULT_BIZTYPE))
        await bus.start()
        return bus

    def get_network_instance(self) -> Bus:
        return self._network_instance

    def register(self, rank: str) -> None:
        """Tell the manager that this agent is there."""
        body = MsgBody(msg_type="REGISTER", code=0, message="", extension={})
        text = json.dumps(body.__dict__)
        self.send_message(MessageInfo(str(uuid.uuid4()), DEFAULT_BIZTYPE, DEFAULT_DST, text))

    def send_message(self, message: MessageInfo, code: int = 0) -> bool:
        """Whether it has arrived; it is tried a few times."""
        try:
            body = decode(message.body, "Agent")
        except NotABody as problem:
            self._log.error("the message is not sent: %s", problem)
            return False
        dst = Place(message.dst.role, message.dst.server_rank, message.dst.process_rank)
        for _ in range(constants.SEND_RETRY_TIMES):
            sending = self._network_instance.send(dst, body, uuid=message.uuid)
            sent = self._thread.run(sending).result()
            if sent:
                return True
            self._log.warning("%s did not arrive: %s", message.uuid, sent.code.sentence)
        return False

    def receive_message(self) -> None:
        """Blocks until closed: everything that arrives goes to the queue, once."""
        while True:
            try:
                received = self._thread.run(self._network_instance.receive()).result()
            except (CancelledError, Permanent):
                return
            if received.uuid in self._seen:
                continue
            self._seen[received.uuid] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            told = json.loads(encode(received.body))
            body = received.body
            extension = body.extension if isinstance(body, Unknown) else told["extension"]
            self.msg_queue.put(
                MsgBody(told["msg_type"], told["code"], told["message"], dict(extension or {}))
            )

    def close(self) -> None:
        self._thread.run(self._network_instance.close()).result()
        self._thread.stop()
        AgentMessageManager.instance = None


def init_network_client(
    network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
) -> threading.Thread:
    """Join, register and receive in a thread that does not keep the process alive."""
    thread = threading.Thread(
        target=init_message_manager, args=(network_config, msg_queue, logger), daemon=True
    )
    thread.start()
    return thread


def init_message_manager(
    network_config: NetworkConfig, msg_queue: queue.Queue[MsgBody], logger: Any = run_log
) -> None:
    """Blocks while messages are received."""
    if network_config is None or msg_queue is None or logger is None:
        raise ValueError("the network's settings, a queue and a logger are needed")
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
        run_log.warning("there is no network yet; the message is dropped")
        return
    manager.send_message(msg, code)
