"""MindSpore's older way: no manager, the cluster's reset files say what has happened.

MindSpore falls back to this plugin when `init_taskd_agent` is refused. Once a second it looks at
its processes and at the files, and `decide` says what follows; the plugin carries it out with the
functions that MindSpore has registered. Faults are told by the files, so files are what it polls.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

from taskd import proxy
from taskd.agent.seams import msrun_scheduler as scheduler
from taskd.agent.seams.msrun import leave, shown_ranks
from taskd.ascend.documented.recover_manager import init_grpc_client
from taskd.ascend.msrun.fault_check import (
    FaultProcessor,
    FaultStatus,
    force_exit_pids,
    grace_exit_pids,
    stop_pids,
)
from taskd.ascend.msrun.ms_utils import (
    calculate_global_rank,
    calculate_local_rank_by_global_rank,
    check_monitor_res_valid,
)
from taskd.ascend.recover_flags import flags as shared_data_inst
from taskd.ascend.toolkit import constants
from taskd.ascend.toolkit.run_log import run_log
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
"""Other nodes see the end of the first one's workers before it goes."""


class Next(Enum):
    GO_ON = "nothing has happened"
    LEAVE = "the job is to be ended"
    END_GENTLY = "the cluster asks for a graceful end"
    RESTART_SOME = "some ranks of this node have failed and may be restarted alone"
    GIVE_UP = "ranks of this node have failed"
    AWAIT = "not every rank has recovered yet"
    RESTART_ALL = "the job has been retried"
    STOP_ALL = "ranks elsewhere have not recovered"
    STOP_AND_START_ALL = "every rank has recovered"
    FINISH = "every rank has finished"
    AWAIT_FILES = "a process has failed; the files will say whether it may be restarted"
    FAIL = "a process has failed"


@dataclass(frozen=True, slots=True)
class Round:
    """Everything that one decision looks at."""

    first_node: bool
    kill_flag: bool
    grace_exit: bool
    fault: FaultStatus
    may_restart_some: bool
    recovered: bool
    finished: bool
    unhealthy: bool


def decide(now: Round) -> Next:
    if now.first_node and now.kill_flag:
        return Next.LEAVE
    if now.grace_exit:
        return Next.END_GENTLY
    if now.fault.is_fault:
        alone = now.may_restart_some and now.fault.restart_fault_process
        return Next.RESTART_SOME if alone else Next.GIVE_UP
    if now.fault.is_retried and not now.fault.is_unrecovered:
        return Next.RESTART_ALL if now.recovered else Next.AWAIT
    if now.fault.is_unrecovered:
        return Next.STOP_AND_START_ALL if now.recovered else Next.STOP_ALL
    if now.finished:
        return Next.FINISH
    if now.unhealthy:
        return Next.AWAIT_FILES if now.may_restart_some else Next.FAIL
    return Next.GO_ON


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
        """Runs the node's part of the job, then ends the interpreter with its exit code."""
        if missing := [name for name in NEEDED if name not in self._funcs]:
            raise ValueError(f"not registered: {', '.join(missing)}")
        shown = shown_ranks(self._funcs[constants.MONITOR_CALLBACK_NAME])
        self.node_global_rank_ids = calculate_global_rank() or [int(rank) for rank in shown]
        signal.signal(signal.SIGTERM, leave)
        threading.Thread(target=self._join_manager, name="taskd-proxy", daemon=True).start()
        try:
            self.start_mindspore_workers()
            if self.ms_node_rank == FIRST_NODE:
                init_grpc_client(self.framework)
            while True:
                self.wait(self.monitor_interval)
                self.take_a_round()
        finally:  # its workers have sessions of their own: they would outlive us
            self._kill_all()
            if (msrun := self._msrun()) is not None:
                scheduler.end(msrun)
            proxy.stop()

    def _join_manager(self) -> None:
        """Our part needs no manager, but ranks that are to be recorded reach theirs through us."""
        manager = environ.get("MS_SCHED_HOST") or constants.LOCAL_PROXY_IP
        told = {"UpstreamAddr": manager, "ServerRank": self.ms_node_rank}
        try:
            proxy.start(proxy.ProxyConfig.of(told, environ))
        except SettingsError as error:
            run_log.warning("there is no proxy for this node's ranks: %s", error)

    def take_a_round(self) -> Next:
        """Look, decide, act; may end the interpreter."""
        seen = self._funcs[constants.MONITOR_CALLBACK_NAME]([constants.MONITOR_ALL_WORKERS])
        if not check_monitor_res_valid(seen):
            run_log.warning("MONITOR gave no sound answer: %.200r", seen)
            if not self._to_be_killed():
                return Next.GO_ON
        else:
            self._note(seen)
        chosen = decide(self._look())
        if chosen is not Next.GO_ON:
            run_log.info("MSRunPlugin: %s", chosen.value)
        self._act(chosen)
        return chosen

    def start_mindspore_workers(self) -> None:
        self._wait_to_start()
        self._funcs[constants.START_ALL_WORKER_CALLBACK_NAME]()

    def start_mindspore_worker_list(self, global_ranks: list[int]) -> None:
        local = calculate_local_rank_by_global_rank(global_ranks)
        if local is None:
            raise ValueError("MS_LOCAL_WORKER does not say how many workers a node has")
        self._wait_to_start()
        self._funcs[constants.START_WORKER_LIST_CALLBACK_NAME](local)

    # Looking

    def _note(self, seen: dict[int, dict[str, Any]]) -> None:
        states = [item[constants.RANK_STATUS_KEY] for item in seen.values()]
        well = (
            constants.RANK_STATUS_OK,
            constants.RANK_STATUS_NOT_START,
            constants.RANK_STATUS_COMPLETE,
        )
        self.unhealthy = any(state not in well for state in states)
        self.all_rank_succeed = bool(states) and all(
            state == constants.RANK_STATUS_COMPLETE for state in states
        )
        self.rank_pids = {
            item[constants.GLOBAL_RANK_ID_KEY]: item[constants.RANK_PID_KEY]
            for item in seen.values()
            if item[constants.RANK_PID_KEY] is not None
        }

    def _look(self) -> Round:
        fault = self.faults.get_fault_status(self._group())
        if self.faults.fault_ranks == self.faults.pre_fault_ranks:
            # The files go on saying "recovered" when the ranks have been started again.
            fault = replace(fault, is_unrecovered=False)
        return Round(
            first_node=self.ms_node_rank == FIRST_NODE,
            kill_flag=shared_data_inst.get_kill_flag(),
            grace_exit=self.faults.grace_exit == 1,
            fault=fault,
            may_restart_some=self._may_restart_some() and bool(self.rank_pids),
            recovered=self.faults.is_recovered(),
            finished=self.all_rank_succeed,
            unhealthy=self.unhealthy,
        )

    def _group(self) -> SimpleNamespace:
        """This node's ranks as the reader of the reset files knows them."""
        workers = [SimpleNamespace(global_rank=rank) for rank in self.node_global_rank_ids]
        return SimpleNamespace(workers=workers)

    def _may_restart_some(self) -> bool:
        on = environ.get(constants.ENABLE_RESTART_FAULT_PROCESS_ENV) == "on"
        return on and self.ms_node_rank != FIRST_NODE

    def _to_be_killed(self) -> bool:
        return self.ms_node_rank == FIRST_NODE and bool(shared_data_inst.get_kill_flag())

    # Acting

    def _act(self, chosen: Next) -> None:
        match chosen:
            case Next.GO_ON | Next.AWAIT:
                pass
            case Next.LEAVE:
                self._kill_all()
                sys.exit(1)
            case Next.END_GENTLY:
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
                    shared_data_inst.set_exit_flag(True)
                self._start_all_anew()
                self.faults.pre_retry_time = self.faults.retry_time
                self.faults.pre_fault_ranks = []
            case Next.STOP_ALL:
                self._kill_all()
            case Next.STOP_AND_START_ALL:
                self._kill_all()
                self._start_all_anew()
            case Next.FINISH:
                shared_data_inst.set_kill_flag(True)
                self.wait(SETTLE_S)
                self._kill_all()
                sys.exit(0)
            case Next.AWAIT_FILES:
                self._await_files()
            case Next.FAIL:
                if self.ms_node_rank == FIRST_NODE:
                    shared_data_inst.set_kill_flag(True)
                self.wait(SETTLE_S)
                self._kill_all()
                sys.exit(1)

    def _kill_all(self) -> None:
        self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME]([constants.KILL_ALL_WORKERS])

    def _msrun(self) -> scheduler.ProcessManager | None:
        return scheduler.process_manager(self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME])

    def _start_all_anew(self) -> None:
        msrun = self._msrun()
        if msrun is None:
            self.wait(constants.KILL_INTERVAL)  # MindSpore's scheduler forgets the dead slowly
        else:
            scheduler.renew(msrun)
        self.start_mindspore_workers()

    def _restart_some(self, ranks: list[int]) -> None:
        pids = [self.rank_pids[rank] for rank in ranks if rank in self.rank_pids]
        self._funcs[constants.KILL_ALL_WORKER_CALLBACK_NAME](pids)
        force_exit_pids(pids)
        self.faults.update_fault_info()
        self.start_mindspore_worker_list(ranks)

    def _await_files(self) -> None:
        """The files name the failed ranks a little later than we see them fail."""
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
                raise ValueError(f"no leave to start in {constants.INIT_TIMEOUT} s")
            self.wait(constants.WAITING_INTERVAL)
