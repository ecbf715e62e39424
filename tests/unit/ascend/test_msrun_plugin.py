"""The reset files and a process manager's answers, and what MSRunPlugin makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taskd.python.framework.agent.ms_mgr.ms_utils import (
    calculate_global_rank,
    calculate_local_rank_by_global_rank,
    check_monitor_res_valid,
)
from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin, Next, Round, decide
from taskd.python.toolkit.fault_checker.fault_check import FaultStatus
from taskd.python.toolkit.recover_module.shared_data import shared_data_inst

QUIET = Round(
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
    ("now", "what"),
    [
        (QUIET, Next.GO_ON),
        (replace(QUIET, first_node=True, kill_flag=True), Next.LEAVE),
        (replace(QUIET, kill_flag=True), Next.GO_ON),
        (replace(QUIET, grace_exit=True, unhealthy=True), Next.END_GENTLY),
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
        (replace(QUIET, fault=FaultStatus(is_retried=True), recovered=False), Next.AWAIT),
        (replace(QUIET, fault=FaultStatus(is_unrecovered=True)), Next.STOP_AND_START_ALL),
        (replace(QUIET, fault=FaultStatus(is_unrecovered=True), recovered=False), Next.STOP_ALL),
        (replace(QUIET, finished=True), Next.FINISH),
        (replace(QUIET, unhealthy=True), Next.FAIL),
        (replace(QUIET, unhealthy=True, may_restart_some=True), Next.AWAIT_FILES),
    ],
)
def test_what_follows(now: Round, what: Next) -> None:
    assert decide(now) is what


class Trial:
    def __init__(self, folder: Path, node: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.seen: Any = {
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
        self.plugin.register_callbacks("MONITOR", lambda ranks: self.seen)

    def _note(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 0

        return call

    def status(self, *states: int | None) -> None:
        for rank, state in enumerate(states):
            self.seen[rank] |= {"status": state, "pid": 2**22 + rank}

    def files(self, **told: Any) -> None:
        self.reset.write_text(json.dumps(told))


@pytest.fixture
def node0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    yield from _trial(tmp_path, monkeypatch, "0")


@pytest.fixture
def node1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    yield from _trial(tmp_path, monkeypatch, "1")


def _trial(folder: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> Iterator[Trial]:
    monkeypatch.setenv("MS_NODE_RANK", node)
    monkeypatch.setenv("MS_LOCAL_WORKER", "2")
    yield Trial(folder, node)
    shared_data_inst.set_kill_flag(False)
    shared_data_inst.set_exit_flag(False)


def test_all_four_functions_are_needed() -> None:
    with pytest.raises(ValueError, match="KILL_WORKER"):
        MSRunPlugin().start()


def test_a_finished_job_ends_with_0(node0: Trial) -> None:
    node0.status(0, 0)
    with pytest.raises(SystemExit) as left:
        node0.plugin.take_a_round()
    assert left.value.code == 0
    assert node0.calls == [("KILL_WORKER", [-1])]
    assert shared_data_inst.get_kill_flag()


def test_a_failed_process_ends_the_job_with_1(node0: Trial) -> None:
    node0.status(None, 1)
    with pytest.raises(SystemExit) as left:
        node0.plugin.take_a_round()
    assert left.value.code == 1


def test_only_the_failed_rank_is_restarted(node1: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_RESTART_FAULT_PROCESS", "on")
    node1.status(None, None)
    node1.files(RankList=[{"RankId": 3, "Status": "fault"}], RestartFaultProcess=True)
    monkeypatch.setattr(node1.plugin.faults, "wait_to_start", lambda group: True)
    assert node1.plugin.take_a_round() is Next.RESTART_SOME
    assert node1.calls == [("KILL_WORKER", [2**22 + 1]), ("START_WORKER_LIST", [1])]
    node1.calls.clear()
    assert node1.plugin.take_a_round() is Next.GO_ON
    assert node1.calls == []


def test_a_retried_job_is_restarted_once(node0: Trial) -> None:
    node0.status(None, None)
    node0.files(RankList=[], RetryTime=1)
    assert node0.plugin.take_a_round() is Next.RESTART_ALL
    assert node0.calls == [("KILL_WORKER", [-1]), ("START_ALL_WORKER",)]
    assert shared_data_inst.get_exit_flag()
    assert node0.plugin.take_a_round() is Next.GO_ON


def test_unrecovered_ranks_elsewhere_stop_this_node_until_they_are_back(node1: Trial) -> None:
    node1.status(None, None)
    node1.files(RankList=[{"RankId": 0, "Status": "unrecovered"}])
    assert node1.plugin.take_a_round() is Next.STOP_ALL
    node1.files(RankList=[{"RankId": 0, "Status": "recovered"}])
    assert node1.plugin.take_a_round() is Next.STOP_AND_START_ALL
    assert node1.calls[-1] == ("START_ALL_WORKER",)
    assert node1.plugin.take_a_round() is Next.GO_ON, "the files still say the same"


def test_an_unsound_answer_changes_nothing(node0: Trial) -> None:
    node0.seen = {0: {"pid": "7"}}
    assert node0.plugin.take_a_round() is Next.GO_ON


def test_the_contract_of_monitor() -> None:
    good = {"pid": 1, "status": None, "global_rank": 0}
    assert check_monitor_res_valid({0: good})
    assert check_monitor_res_valid({0: good | {"pid": None, "status": 200}})
    bads: list[Any] = [None, [], {0: []}, {0: {"pid": 1}}, {0: good | {"status": "0"}}]
    for bad in bads:
        assert not check_monitor_res_valid(bad)


def test_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_NODE_RANK", "2")
    monkeypatch.setenv("MS_LOCAL_WORKER", "3")
    assert calculate_global_rank() == [6, 7, 8]
    assert calculate_local_rank_by_global_rank([6, 8]) == [0, 2]
    monkeypatch.setenv("MS_LOCAL_WORKER", "0")
    assert calculate_local_rank_by_global_rank([6]) is None
    monkeypatch.delenv("MS_LOCAL_WORKER")
    assert calculate_global_rank() == []
    assert calculate_local_rank_by_global_rank([6]) is None
