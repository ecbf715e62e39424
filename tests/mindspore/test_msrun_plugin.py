"""MindSpore falls back to MSRunPlugin when our agent is switched off: reset files, no manager."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.mindspore.job import HERE, Done, Then, interrupt, run, steps, weights, write

ALL = [0, 1, 2, 3, 4, 5]


def job(folder: Path, on: dict[str, Then] | None = None, **env: str) -> Done:
    env |= {"TASKD_PROCESS_ENABLE": "off", "RESET_FILES": str(folder)}
    env["MSRUN"] = f"python {HERE / 'msrun_elsewhere.py'}"
    return run(folder, manager=False, nodes=1, on=on, **env)


def test_a_retried_job_is_restarted(tmp_path: Path) -> None:
    def retry() -> None:
        write(tmp_path / "reset.json", {"RankList": [], "RetryTime": 1})

    done = job(tmp_path, {"held": retry}, HOLD="1.3")
    assert done.code == 0, done.told
    assert "MSRunPlugin: the job has been retried" in done.output
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert len(weights(tmp_path)) == 1
    assert done.left == []


def test_ranks_stand_until_the_others_have_recovered(tmp_path: Path) -> None:
    def elsewhere(status: str) -> None:
        write(tmp_path / "reset.json", {"RankList": [{"RankId": 7, "Status": status}]})

    on: dict[str, Then] = {
        "held": lambda: elsewhere("unrecovered"),
        "MSRunPlugin: ranks elsewhere have not recovered": lambda: elsewhere("recovered"),
    }
    done = job(tmp_path, on, HOLD="1.3")
    assert done.code == 0, done.told
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert done.left == []


def test_a_fault_of_this_node_ends_its_part(tmp_path: Path) -> None:
    def fault() -> None:
        write(tmp_path / "reset.json", {"RankList": [{"RankId": 1, "Status": "fault"}]})

    done = job(tmp_path, {"held": fault}, HOLD="0.1")
    assert done.code == 1, done.told
    assert "MSRunPlugin: ranks of this node have failed" in done.output
    assert done.left == []


def test_a_killed_worker_ends_the_job(tmp_path: Path) -> None:
    done = job(tmp_path, DIE="1.1")
    assert done.code == 1, done.told
    assert "MSRunPlugin: a process has failed" in done.output
    assert done.left == []


def test_sigterm_ends_the_whole_job(tmp_path: Path) -> None:
    done = job(tmp_path, {"held": lambda: interrupt(tmp_path)}, HOLD="0.1")
    assert done.code == 128 + signal.SIGTERM, done.told
    assert done.left == []
