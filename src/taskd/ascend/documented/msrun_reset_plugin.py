"""MindSpore's agent for jobs without a manager: the cluster reports faults in the reset files.

MindSpore falls back to this plugin when `init_taskd_agent` returns False. Once per second the
plugin reads the state of its processes and the reset files, `decide` chooses what to do, and the
plugin does it with the callbacks that MindSpore has registered. It polls because files are the only
source of faults here.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

from taskd import proxy
from taskd.agent.seams.msrun import (
    ProcessManager,
    exit_on_signal,
    is_valid_answer,
    local_ranks,
    monitored_ranks,
    process_manager_of,
    restart_scheduler,
    stop_scheduler,
)
from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented.recover_functions import init_grpc_client
from taskd.ascend.documented.reset_files import (
    FaultProcessor,
    FaultStatus,
    force_exit_pids,
    grace_exit_pids,
    stop_pids,
)
from taskd.ascend.documented.run_log import run_log
from taskd.ascend.recover_client import flags
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic

NEEDED = (
    constants.KILL_ALL_WORKER_CALLBACK_NAME,
    constants.START_ALL_WORKER_CALLBACK_NAME,
    constants.START_WORKER_LIST_CALLBACK_NAME,
    constants.MONITOR_CALLBACK_NAME,
)
FIRST_NODE = "0"
SETTLE_S = 10
"""The other nodes notice the end of the first node's workers before the first node exits."""


def check_monitor_res_valid(rank_status_dict: object) -> bool:
    """Whether the result of MONITOR follows its contract."""
    return is_valid_answer(rank_status_dict)


def calculate_global_rank() -> list[int]:
    """This node's global ranks; empty if the environment does not define them."""
    return [int(rank) for rank in local_ranks()]


def calculate_local_rank_by_global_rank(global_rank_list: Iterable[int]) -> list[int] | None:
    """The local ranks of these global ranks; None if the environment does not define them."""
    try:
        size = int(environ["MS_LOCAL_WORKER"])
        return [rank % size for rank in global_rank_list]
    except (KeyError, ValueError, ZeroDivisionError):
        return None


class Next(Enum):
    CONTINUE = "nothing has happened"
    EXIT = "the job must end"
    EXIT_GRACEFULLY = "the cluster asks for a graceful exit"
    RESTART_SOME = "some ranks of this node have failed and may be restarted alone"
    GIVE_UP = "ranks of this node have failed"
    WAIT = "not all ranks have recovered yet"
    RESTART_ALL = "the cluster has retried the job"
    STOP_ALL = "ranks of other nodes have not recovered"
    STOP_AND_START_ALL = "all ranks have recovered"
    FINISH = "all ranks have finished"
    WAIT_FOR_FILES = "a process has failed; the reset files will tell whether it may be restarted"
    FAIL = "a process has failed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inputs of one decision."""

    first_node: bool
    kill_flag: bool
    grace_exit: bool
    fault: FaultStatus
    may_restart_some: bool
    recovered: bool
    finished: bool
    unhealthy: bool


def decide(now: Snapshot) -> Next:
    if now.first_node and now.kill_flag:
        return Next.EXIT
    if now.grace_exit:
        return Next.EXIT_GRACEFULLY
    if now.fault.is_fault:
        alone = now.may_restart_some and now.fault.restart_fault_process
        return Next.RESTART_SOME if alone else Next.GIVE_UP
    if now.fault.is_retried and not now.fault.is_unrecovered:
        return Next.RESTART_ALL if now.recovered else Next.WAIT
    if now.fault.is_unrecovered:
        return Next.STOP_AND_START_ALL if now.recovered else Next.STOP_ALL
    if now.finished:
        return Next.FINISH
    if now.unhealthy:
        return Next.WAIT_FOR_FILES if now.may_restart_some else Next.FAIL
    return Next.CONTINUE


class MSRunPlugin:
    def __init__(self) -> None:
        self.framework = "mindspore"
        self.ms_node_rank = environ.get("MS_NODE_RANK", FIRST_NODE)
        self.monitor_interval = constants.MONITOR_INTERVAL
        self.all_rank_succeed = False
        self.unhealthy = False
        self.rank_pids: dict[int, int] = {}
        """The pid of each of this node's global ranks."""
        self.node_global_rank_ids: list[int] = []
        self.faults = FaultProcessor()
        self.wait: Callable[[float], object] = threading.Event().wait
        self._funcs: dict[str, Callable[..., Any]] = {}

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self._funcs[operator] = func

    def start(self) -> None:
        """Run the node's part of the job, then exit the interpreter with its exit code."""
        if missing := [name for name in NEEDED if name not in self._funcs]:
            raise ValueError(f"these callbacks are not registered: {', '.join(missing)}")
        shown = monitored_ranks(self._funcs[constants.MONITOR_CALLBACK_NAME])
        self.node_global_rank_ids = calculate_global_rank() or [int(rank) for rank in shown]
        signal.signal(signal.SIGTERM, exit_on_signal)
        threading.Thread(target=self._join_manager, name="taskd-proxy", daemon=True).start()
        try:
            self.start_mindspore_workers()
            if self.ms_node_rank == FIRST_NODE:
                init_grpc_client(self.framework)
            while True:
                self.wait(self.monitor_interval)
                self.run_once()
        finally:  # The workers have their own sessions: they would outlive this process.
            self._kill_all()
            if (msrun := self._msrun()) is not None:
                stop_scheduler(msrun)
            proxy.stop()

    def _join_manager(self) -> None:
        """Start the proxy through which profiled ranks reach a manager; the plugin needs none."""
        manager = environ.get("MS_SCHED_HOST") or constants.LOCAL_PROXY_IP
        config = {"UpstreamAddr": manager, "ServerRank": self.ms_node_rank}
        try:
            proxy.start(proxy.ProxyConfig.of(config, environ))
        except SettingsError as error:
            run_log.warning("the proxy for this node's ranks did not start: %s", error)

    def run_once(self) -> Next:
        """Read the state, decide, act. May exit the interpreter."""
        result = self._funcs[constants.MONITOR_CALLBACK_NAME]([constants.MONITOR_ALL_WORKERS])
        if not check_monitor_res_valid(result):
            run_log.warning("MONITOR returned an invalid result: %.200r", result)
            if not self._is_to_be_killed():
                return Next.CONTINUE
        else:
            self._note(result)
        chosen = decide(self._snapshot())
        if chosen is not Next.CONTINUE:
            run_log.info("MSRunPlugin: %s", chosen.value)
        self._act(chosen)
        return chosen

    def start_mindspore_workers(self) -> None:
        self._wait_to_start()
        self._funcs[constants.START_ALL_WORKER_CALLBACK_NAME]()

    def start_mindspore_worker_list(self, global_ranks: list[int]) -> None:
        local = calculate_local_rank_by_global_rank(global_ranks)
        if local is None:
            raise ValueError("MS_LOCAL_WORKER is not set to the number of workers per node")
        self._wait_to_start()
        self._funcs[constants.START_WORKER_LIST_CALLBACK_NAME](local)

    # Reading the state

    def _note(self, result: dict[int, dict[str, Any]]) -> None:
        states = [item[constants.RANK_STATUS_KEY] for item in result.values()]
        healthy = (
            constants.RANK_STATUS_OK,
            constants.RANK_STATUS_NOT_START,
            constants.RANK_STATUS_COMPLETE,
        )
        self.unhealthy = any(state not in healthy for state in states)
        self.all_rank_succeed = bool(states) and all(
            state == constants.RANK_STATUS_COMPLETE for state in states
        )
        self.rank_pids = {
            item[constants.GLOBAL_RANK_ID_KEY]: item[constants.RANK_PID_KEY]
            for item in result.values()
            if item[constants.RANK_PID_KEY] is not None
        }

    def _snapshot(self) -> Snapshot:
        fault = self.faults.get_fault_status(self._group())
        if self.faults.fault_ranks == self.faults.pre_fault_ranks:
            # The files still list the ranks as "recovered" after they have been started again.
            fault = replace(fault, is_unrecovered=False)
        return Snapshot(
            first_node=self.ms_node_rank == FIRST_NODE,
            kill_flag=flags.get_kill_flag(),
            grace_exit=self.faults.grace_exit == 1,
            fault=fault,
            may_restart_some=self._may_restart_some() and bool(self.rank_pids),
            recovered=self.faults.has_recovered(),
            finished=self.all_rank_succeed,
            unhealthy=self.unhealthy,
        )

    def _group(self) -> SimpleNamespace:
        """This node's ranks in the form that `FaultProcessor` expects."""
        workers = [SimpleNamespace(global_rank=rank) for rank in self.node_global_rank_ids]
        return SimpleNamespace(workers=workers)

    def _may_restart_some(self) -> bool:
        on = environ.get(constants.ENABLE_RESTART_FAULT_PROCESS_ENV) == "on"
        return on and self.ms_node_rank != FIRST_NODE

    def _is_to_be_killed(self) -> bool:
        return self.ms_node_rank == FIRST_NODE and bool(flags.get_kill_flag())

    # Acting

    def _act(self, chosen: Next) -> None:
        match chosen:
            case Next.CONTINUE | Next.WAIT:
                pass
            case Next.EXIT:
                self._kill_all()
                sys.exit(1)
            case Next.EXIT_GRACEFULLY:
                grace_exit_pids(self.rank_pids)
                self._kill_all()
                stop_pids(self.rank_pids)
            case Next.RESTART_SOME:
                self._restart_some(self.faults.get_fault_status(self._group()).local_ranks)
            case Next.GIVE_UP:
                self._kill_all()
                force_exit_pids(self.rank_pids)
                sys.exit(1)
            case Next.RESTART_ALL:
                self._kill_all()
                if self.ms_node_rank == FIRST_NODE:
                    flags.set_exit_flag(True)
                self._start_all_again()
                self.faults.pre_retry_time = self.faults.retry_time
                self.faults.pre_fault_ranks = []
            case Next.STOP_ALL:
                self._kill_all()
            case Next.STOP_AND_START_ALL:
                self._kill_all()
                self._start_all_again()
            case Next.FINISH:
                flags.set_kill_flag(True)
                self.wait(SETTLE_S)
                self._kill_all()
                sys.exit(0)
            case Next.WAIT_FOR_FILES:
                self._wait_for_files()
            case Next.FAIL:
                if self.ms_node_rank == FIRST_NODE:
                    flags.set_kill_flag(True)
                self.wait(SETTLE_S)
                self._kill_all()
                sys.exit(1)

    def _kill_all(self) -> None:
        self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME]([constants.KILL_ALL_WORKERS])

    def _msrun(self) -> ProcessManager | None:
        return process_manager_of(self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME])

    def _start_all_again(self) -> None:
        msrun = self._msrun()
        if msrun is None:
            self.wait(constants.KILL_INTERVAL)  # MindSpore's scheduler drops dead workers slowly
        else:
            restart_scheduler(msrun)
        self.start_mindspore_workers()

    def _restart_some(self, ranks: list[int]) -> None:
        pids = [self.rank_pids[rank] for rank in ranks if rank in self.rank_pids]
        self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME](pids)
        force_exit_pids(pids)
        self.faults.update_fault_info()
        self.start_mindspore_worker_list(ranks)

    def _wait_for_files(self) -> None:
        """The files list the failed ranks shortly after MONITOR shows the failure."""
        deadline = monotonic() + constants.INIT_RESET_CHANGE_TIMEOUT
        while monotonic() < deadline:
            fault = self.faults.get_fault_status(self._group())
            if fault.local_ranks and fault.restart_fault_process:
                self._restart_some(fault.local_ranks)
                return
            self.wait(constants.WAITING_RESET_CHANGE_INTERVAL)
        self._act(Next.FAIL)

    def _wait_to_start(self) -> None:
        deadline = monotonic() + constants.INIT_TIMEOUT
        while not self.faults.wait_to_start(self._group()):
            if monotonic() >= deadline:
                limit_s = constants.INIT_TIMEOUT
                raise ValueError(f"the reset files did not allow the start within {limit_s} s")
            self.wait(constants.WAITING_INTERVAL)
