"""MindSpore uses MSRunPlugin when TaskD's agent is switched off: reset files, no manager."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.mindspore.job import HERE, Action, Done, interrupt, run, steps, weights, write

ALL = [0, 1, 2, 3, 4, 5]


def job(folder: Path, on: dict[str, Action] | None = None, **env: str) -> Done:
    env |= {"TASKD_PROCESS_ENABLE": "off", "RESET_FILES": str(folder)}
    env["MSRUN"] = f"python {HERE / 'msrun_elsewhere.py'}"
    return run(folder, manager=False, nodes=1, on=on, **env)


def test_retried_job_is_restarted(tmp_path: Path) -> None:
    def retry() -> None:
        write(tmp_path / "reset.json", {"RankList": [], "RetryTime": 1})

    done = job(tmp_path, {"held": retry}, HOLD="1.3")
    assert done.code == 0, done.log
    assert "MSRunPlugin: the cluster has retried the job" in done.output
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert len(weights(tmp_path)) == 1
    assert done.left == []


def test_ranks_wait_until_ranks_of_other_nodes_have_recovered(tmp_path: Path) -> None:
    def other_node(status: str) -> None:
        write(tmp_path / "reset.json", {"RankList": [{"RankId": 7, "Status": status}]})

    on: dict[str, Action] = {
        "held": lambda: other_node("unrecovered"),
        "MSRunPlugin: ranks of other nodes have not recovered": lambda: other_node("recovered"),
    }
    done = job(tmp_path, on, HOLD="1.3")
    assert done.code == 0, done.log
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert done.left == []


def test_fault_of_this_node_ends_its_ranks(tmp_path: Path) -> None:
    def fault() -> None:
        write(tmp_path / "reset.json", {"RankList": [{"RankId": 1, "Status": "fault"}]})

    done = job(tmp_path, {"held": fault}, HOLD="0.1")
    assert done.code == 1, done.log
    assert "MSRunPlugin: ranks of this node have failed" in done.output
    assert done.left == []


def test_killed_worker_ends_the_job(tmp_path: Path) -> None:
    done = job(tmp_path, DIE="1.1")
    assert done.code == 1, done.log
    assert "MSRunPlugin: a process has failed" in done.output
    assert done.left == []


def test_sigterm_ends_the_whole_job(tmp_path: Path) -> None:
    done = job(tmp_path, {"held": lambda: interrupt(tmp_path)}, HOLD="0.1")
    assert done.code == 128 + signal.SIGTERM, done.log
    assert done.left == []
