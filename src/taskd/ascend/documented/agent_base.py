"""`BaseAgent`, the documented base class of agents, and functions that agents use."""

from __future__ import annotations

import copy
import json
import queue
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented.agent_messages import (
    DEFAULT_BIZTYPE,
    DEFAULT_DST,
    MessageInfo,
    MsgBody,
    NetworkConfig,
    get_message_manager,
    network_send_message,
)
from taskd.ascend.documented.reset_files import grace_exit_pids, stop_pids
from taskd.ascend.documented.run_log import run_log
from taskd.ascend.recover_client import hccl_switch_nic_timeout
from taskd.config import environ
from taskd.runtime.clock import monotonic

DEFAULT_MSG_TYPE = "DEFAULT"
STATUS_MSG_TYPE = "STATUS"
NO_LIMIT = -1


def get_hccl_switch_nic_timeout() -> int:
    """How many seconds a pause for a link switch may last."""
    return hccl_switch_nic_timeout()


def get_report_fault_timeout() -> int:
    """How many seconds an agent waits for orders after it has reported a fault; -1: no limit."""
    text = environ.get("TASKD_REPORT_FAULT_TIMEOUT", "")
    if not text.isdecimal():
        return NO_LIMIT
    seconds = int(text)
    allowed = constants.MIN_REPORT_FAULT_TIMEOUT <= seconds <= constants.MAX_REPORT_FAULT_TIMEOUT
    return seconds if allowed else NO_LIMIT


def get_pids(pcontext_dict: Mapping[int, Any]) -> dict[int, int]:
    """The pid of each local rank, from process contexts that hold exactly one process each."""
    return {rank: context.pids()[0] for rank, context in pcontext_dict.items()}


def get_fault_workers(worker_group: Any, fault_ranks: Iterable[int]) -> Any:
    """A copy of the group with only the workers of these global ranks."""
    wanted = set(fault_ranks)
    part = copy.copy(worker_group)
    part.workers = {worker for worker in worker_group.workers if worker.global_rank in wanted}
    return part


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
        """Wait until the network is initialised; ValueError after three minutes."""
        deadline = monotonic() + constants.INIT_NETWORK_TIMEOUT
        pause = queue.Queue[None]()
        while get_message_manager() is None:
            if monotonic() >= deadline:
                limit_s = constants.INIT_NETWORK_TIMEOUT
                raise ValueError(f"the network was not initialised within {limit_s} s")
            try:
                pause.get(timeout=0.2)
            except queue.Empty:
                continue

    def handle_message(self) -> None:
        """Handle all queued messages. An unknown code raises TypeError, as documented."""
        while not self.msg_queue.empty():
            message = self.msg_queue.get_nowait()
            handler: Any = self.command_map.get(message.code)
            run_log.info("agent %d handles a message: code=%s", self.node_rank, message.code)
            handler(message)

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
        """Whether a limit is set and a reported fault has waited longer than that for an answer."""
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
