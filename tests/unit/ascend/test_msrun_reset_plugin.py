"""What MSRunPlugin does for given reset files and MONITOR results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taskd.ascend.documented.msrun_reset_plugin import Next, Snapshot, decide
from taskd.python.framework.agent.ms_mgr.ms_utils import (
    calculate_global_rank,
    calculate_local_rank_by_global_rank,
    check_monitor_res_valid,
)
from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin
from taskd.python.toolkit.fault_checker.fault_check import FaultStatus
from taskd.python.toolkit.recover_module.shared_data import shared_data_inst

QUIET = Snapshot(
    first_node=False,
    kill_flag=False,
    grace_exit=False,
    fault=FaultStatus(),
    may_restart_some=False,
    recovered=True,
    finished=False,
    unhealthy=False,
)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (QUIET, Next.CONTINUE),
        (replace(QUIET, first_node=True, kill_flag=True), Next.EXIT),
        (replace(QUIET, kill_flag=True), Next.CONTINUE),
        (replace(QUIET, grace_exit=True, unhealthy=True), Next.EXIT_GRACEFULLY),
        (replace(QUIET, fault=FaultStatus(is_fault=True)), Next.GIVE_UP),
        (
            replace(
                QUIET,
                may_restart_some=True,
                fault=FaultStatus(is_fault=True, restart_fault_process=True),
            ),
            Next.RESTART_SOME,
        ),
        (replace(QUIET, fault=FaultStatus(is_retried=True)), Next.RESTART_ALL),
        (replace(QUIET, fault=FaultStatus(is_retried=True), recovered=False), Next.WAIT),
        (replace(QUIET, fault=FaultStatus(is_unrecovered=True)), Next.STOP_AND_START_ALL),
        (replace(QUIET, fault=FaultStatus(is_unrecovered=True), recovered=False), Next.STOP_ALL),
        (replace(QUIET, finished=True), Next.FINISH),
        (replace(QUIET, unhealthy=True), Next.FAIL),
        (replace(QUIET, unhealthy=True, may_restart_some=True), Next.WAIT_FOR_FILES),
    ],
)
def test_decision(now: Snapshot, expected: Next) -> None:
    assert decide(now) is expected


class Node:
    """One node's plugin with recorded callbacks and reset files in a folder."""

    def __init__(self, folder: Path, node: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.monitored: Any = {
            rank: {"pid": None, "status": 200, "global_rank": int(node) * 2 + rank}
            for rank in range(2)
        }
        self.plugin = MSRunPlugin()
        self.plugin.wait = lambda seconds: None
        self.reset = folder / "reset.json"
        self.plugin.faults.reset_cm_path = str(self.reset)
        self.plugin.faults.restart_type_path = str(folder / "restartType")
        self.plugin.faults.rank_version_path = str(folder / "version")
        self.plugin.node_global_rank_ids = calculate_global_rank()
        for name in ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST"):
            self.plugin.register_callbacks(name, self._note(name))
        self.plugin.register_callbacks("MONITOR", lambda ranks: self.monitored)

    def _note(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 0

        return call

    def status(self, *states: int | None) -> None:
        for rank, state in enumerate(states):
            self.monitored[rank] |= {"status": state, "pid": 2**22 + rank}

    def files(self, **content: Any) -> None:
        self.reset.write_text(json.dumps(content))


@pytest.fixture
def node0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    yield from _node(tmp_path, monkeypatch, "0")


@pytest.fixture
def node1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    yield from _node(tmp_path, monkeypatch, "1")


def _node(folder: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> Iterator[Node]:
    monkeypatch.setenv("MS_NODE_RANK", node)
    monkeypatch.setenv("MS_LOCAL_WORKER", "2")
    yield Node(folder, node)
    shared_data_inst.set_kill_flag(False)
    shared_data_inst.set_exit_flag(False)


def test_start_requires_all_four_callbacks() -> None:
    with pytest.raises(ValueError, match="KILL_WORKER"):
        MSRunPlugin().start()


def test_finished_job_exits_with_0(node0: Node) -> None:
    node0.status(0, 0)
    with pytest.raises(SystemExit) as exited:
        node0.plugin.run_once()
    assert exited.value.code == 0
    assert node0.calls == [("KILL_WORKER", [-1])]
    assert shared_data_inst.get_kill_flag()


def test_failed_process_exits_with_1(node0: Node) -> None:
    node0.status(None, 1)
    with pytest.raises(SystemExit) as exited:
        node0.plugin.run_once()
    assert exited.value.code == 1


def test_only_failed_rank_is_restarted(node1: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_RESTART_FAULT_PROCESS", "on")
    node1.status(None, None)
    node1.files(RankList=[{"RankId": 3, "Status": "fault"}], RestartFaultProcess=True)
    monkeypatch.setattr(node1.plugin.faults, "wait_to_start", lambda group: True)
    assert node1.plugin.run_once() is Next.RESTART_SOME
    assert node1.calls == [("KILL_WORKER", [2**22 + 1]), ("START_WORKER_LIST", [1])]
    node1.calls.clear()
    assert node1.plugin.run_once() is Next.CONTINUE
    assert node1.calls == []


def test_retried_job_is_restarted_once(node0: Node) -> None:
    node0.status(None, None)
    node0.files(RankList=[], RetryTime=1)
    assert node0.plugin.run_once() is Next.RESTART_ALL
    assert node0.calls == [("KILL_WORKER", [-1]), ("START_ALL_WORKER",)]
    assert shared_data_inst.get_exit_flag()
    assert node0.plugin.run_once() is Next.CONTINUE


def test_unrecovered_ranks_of_other_nodes_stop_this_node_until_recovered(node1: Node) -> None:
    node1.status(None, None)
    node1.files(RankList=[{"RankId": 0, "Status": "unrecovered"}])
    assert node1.plugin.run_once() is Next.STOP_ALL
    node1.files(RankList=[{"RankId": 0, "Status": "recovered"}])
    assert node1.plugin.run_once() is Next.STOP_AND_START_ALL
    assert node1.calls[-1] == ("START_ALL_WORKER",)
    assert node1.plugin.run_once() is Next.CONTINUE, "the files have not changed"


def test_invalid_monitor_result_changes_nothing(node0: Node) -> None:
    node0.monitored = {0: {"pid": "7"}}
    assert node0.plugin.run_once() is Next.CONTINUE


def test_contract_of_monitor_results() -> None:
    good = {"pid": 1, "status": None, "global_rank": 0}
    assert check_monitor_res_valid({0: good})
    assert check_monitor_res_valid({0: good | {"pid": None, "status": 200}})
    bads: list[Any] = [None, [], {0: []}, {0: {"pid": 1}}, {0: good | {"status": "0"}}]
    for bad in bads:
        assert not check_monitor_res_valid(bad)


def test_ranks_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_NODE_RANK", "2")
    monkeypatch.setenv("MS_LOCAL_WORKER", "3")
    assert calculate_global_rank() == [6, 7, 8]
    assert calculate_local_rank_by_global_rank([6, 8]) == [0, 2]
    monkeypatch.setenv("MS_LOCAL_WORKER", "0")
    assert calculate_local_rank_by_global_rank([6]) is None
    monkeypatch.delenv("MS_LOCAL_WORKER")
    assert calculate_global_rank() == []
    assert calculate_local_rank_by_global_rank([6]) is None
