"""What agents written against the documented Python layer derive from."""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

from taskd.ascend.documented.agent_network import (
    DEFAULT_DST,
    get_message_manager,
    network_send_message,
)
from taskd.ascend.documented.message_types import (
    DEFAULT_BIZTYPE,
    MessageInfo,
    MsgBody,
    NetworkConfig,
)
from taskd.ascend.documented.timeouts import get_report_fault_timeout
from taskd.ascend.msrun.fault_check import grace_exit_pids, stop_pids
from taskd.ascend.toolkit import constants
from taskd.ascend.toolkit.run_log import run_log
from taskd.runtime.clock import monotonic

__all__ = ["DEFAULT_DST", "DEFAULT_MSG_TYPE", "STATUS_MSG_TYPE", "BaseAgent"]

DEFAULT_MSG_TYPE = "DEFAULT"
STATUS_MSG_TYPE = "STATUS"


class BaseAgent:
    def __init__(self) -> None:
        self.node_rank = -1
        self.local_world_size = 0
        self.local_rank: list[int] = []
        self.pids: dict[int, int] = {}
        self.local_fault_rank: list[int] = []
        self._func_map: dict[str, Callable[..., Any]] = {}
        self.command_map: dict[int | str, Callable[[MsgBody], None]] = {}
        self.network_config: NetworkConfig | None = None
        self.msg_queue: queue.Queue[MsgBody] = queue.Queue()
        self.report_fault_time: float | None = None

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self._func_map[operator] = func

    def check_new_fault(self, fault_ranks: Iterable[int]) -> bool:
        return sorted(fault_ranks) != sorted(self.local_fault_rank)

    def check_network(self) -> None:
        """Wait until there is a network; ValueError after three minutes."""
        deadline = monotonic() + constants.INIT_NETWORK_TIMEOUT
        pause = queue.Queue[None]()
        while get_message_manager() is None:
            if monotonic() >= deadline:
                raise ValueError(f"no network in {constants.INIT_NETWORK_TIMEOUT} s")
            try:
                pause.get(timeout=0.2)
            except queue.Empty:
                continue

    def handle_message(self) -> None:
        """Carry out what has arrived. An unknown code is a TypeError, as documented."""
        while not self.msg_queue.empty():
            message = self.msg_queue.get_nowait()
            carry_out: Any = self.command_map.get(message.code)
            run_log.info("agent %d carries out %s", self.node_rank, message.code)
            carry_out(message)

    def grace_exit(self, msg: MsgBody) -> None:
        try:
            grace_exit_pids(self.pids)
        finally:
            stop_pids(self.pids)

    def send_message_to_manager(
        self,
        command: str,
        code: int,
        report_info: Any,
        extension: dict[str, str] | None = None,
    ) -> None:
        plain = asdict(report_info) if is_dataclass(report_info) else report_info  # type: ignore[arg-type]
        text = plain if isinstance(plain, str) else json.dumps(plain)
        body = MsgBody(command, code, text, extension or {})
        packed = json.dumps(asdict(body))
        message = MessageInfo(str(uuid.uuid4()), DEFAULT_BIZTYPE, DEFAULT_DST, packed)
        network_send_message(message, code)

    def is_report_timeout(self) -> bool:
        """Whether a reported fault has waited too long for an answer, where a limit is set."""
        limit_s = get_report_fault_timeout()
        if self.report_fault_time is None or limit_s < 0:
            return False
        return monotonic() - self.report_fault_time > limit_s

    def initialize_workers(self, msg: MsgBody) -> None:
        raise NotImplementedError

    def stop_workers(self, msg: MsgBody) -> None:
        raise NotImplementedError

    def exit_agent(self, msg: MsgBody) -> None:
        raise NotImplementedError

    def restart_workers(self, msg: MsgBody) -> None:
        raise NotImplementedError
