"""MindSpore's `msrun` imports TaskD's agent by itself, with and without the documented manager."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mindspore.job import incidents, interrupt, run, steps, weights

ALL = [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    done = run(folder)
    assert done.code == 0, done.log
    assert "process controlled by mindx" in done.output, "msrun has not found TaskD's agent"
    assert done.starts == 2
    assert done.left == []
    return folder


def test_healthy_job_exits_with_0(healthy: Path) -> None:
    assert steps(healthy) == {0: ALL, 1: ALL}
    assert incidents(healthy) == []
    assert "all ranks have finished" in (healthy / "taskd_log/agent-0.log").read_text()


def test_killed_worker_is_reported_and_the_job_restarted(tmp_path: Path, healthy: Path) -> None:
    done = run(tmp_path, DIE="1.3")
    assert done.code == 0, done.log
    assert incidents(tmp_path) == ["rank 1 exited: signal 9, SIGKILL"]
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert weights(tmp_path) == weights(healthy)
    assert done.left == []


def test_job_without_a_manager_exits_with_the_reason(tmp_path: Path) -> None:
    done = run(tmp_path, manager=False, TASKD_AGENT_JOIN_TIMEOUT_S="3")
    assert done.code == 1, done.log
    assert "no manager answered within 3 s: UNAVAILABLE" in done.output
    assert done.starts == 0
    assert done.left == []


def test_sigterm_ends_the_whole_job(tmp_path: Path) -> None:
    done = run(tmp_path, HOLD="0.1", on={"held": lambda: interrupt(tmp_path)})
    assert done.code == 1, done.log
    assert "node 0 was stopped by SIGTERM" in (tmp_path / "taskd_log/manager.log").read_text()
    assert done.left == []


def test_killed_worker_of_one_node_restarts_both_nodes(tmp_path: Path, healthy: Path) -> None:
    done = run(tmp_path, nodes=2, DIE="1.3")
    assert done.code == 0, done.log
    assert incidents(tmp_path) == ["rank 1 exited: signal 9, SIGKILL"]
    assert done.starts == 4
    assert steps(tmp_path) == {0: ALL, 1: ALL}
    assert weights(tmp_path) == weights(healthy)
    assert done.left == []
