"""The functions of `taskd.api`: arguments, environment, and what they return."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import taskd.api
from taskd.ascend.documented import api_functions, manager_functions

DOCUMENTED = {
    "init_taskd_manager": "taskd_manager_api",
    "start_taskd_manager": "taskd_manager_api",
    "init_taskd_worker": "taskd_worker_api",
    "start_taskd_worker": "taskd_worker_api",
    "destroy_taskd_worker": "taskd_worker_api",
    "init_taskd_agent": "taskd_agent_api",
    "start_taskd_agent": "taskd_agent_api",
    "register_func": "taskd_agent_api",
    "init_taskd_proxy": "taskd_proxy_api",
    "destroy_taskd_proxy": "taskd_proxy_api",
}


def test_api_exports_exactly_the_documented_names() -> None:
    assert set(taskd.api.__all__) == set(DOCUMENTED)
    for name, module in DOCUMENTED.items():
        submodule = getattr(taskd.api, module)
        assert getattr(taskd.api, name) is getattr(submodule, name)


def test_import_loads_no_heavy_module_and_creates_no_file(tmp_path: Path) -> None:
    code = (
        "import sys, taskd.api\n"
        "heavy = {'torch', 'grpc', 'numpy', 'asyncio', 'google.protobuf'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "TASKD_LOG_PATH": "/proc/nowhere", "TASKD_FILE_LOG_LEVEL": "LOUD"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert list(tmp_path.iterdir()) == []


# The manager


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_functions, "_config", None)
    for name in ("PROCESS_RECOVER", "TASKD_PROCESS_ENABLE"):
        monkeypatch.delenv(name, raising=False)


GOOD: dict[str, Any] = {
    "job_id": "job-1",
    "node_nums": 2,
    "proc_per_node": 8,
    "plugin_dir": "/plugins",
    "fault_recover": "",
    "cluster_infos": {"ip": "10.0.0.1", "port": "9601", "name": "n", "role": "r"},
}


def test_manager_completes_the_callers_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**GOOD, "taskd_enable": "off"}
    assert taskd.api.init_taskd_manager(config) is True
    assert config["taskd_enable"] == "on"
    assert config["fault_recover"] == ""
    monkeypatch.setenv("PROCESS_RECOVER", "on")
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    config = dict(GOOD)
    assert taskd.api.init_taskd_manager(config) is True
    assert (config["fault_recover"], config["taskd_enable"]) == ("on", "off")


def test_first_manager_settings_stay() -> None:
    assert taskd.api.init_taskd_manager({**GOOD})
    assert taskd.api.init_taskd_manager({**GOOD, "job_id": "another"})
    assert manager_functions._config is not None
    assert manager_functions._config["job_id"] == "job-1"


@pytest.mark.parametrize("infos", [[], [GOOD["cluster_infos"]], GOOD["cluster_infos"]])
def test_cluster_infos_may_be_a_list_or_a_dict(infos: object) -> None:
    assert taskd.api.init_taskd_manager({"job_id": "j", "cluster_infos": infos, "more": 1}) is True


def test_missing_job_id_is_replaced_by_a_default() -> None:
    """Scripts pass os.getenv("MINDX_TASK_ID"), which may be unset."""
    assert taskd.api.init_taskd_manager({"job_id": None, "node_nums": 1}) is True


@pytest.mark.parametrize(
    "config",
    [
        None,
        "job",
        {"job_id": 7},
        {"node_nums": "2"},
        {"proc_per_node": True},
        {"node_nums": 0},
        {"node_nums": -1},
        {"plugin_dir": 7},
        {"cluster_infos": "here"},
        {"cluster_infos": [{"ip": 7}]},
        {"more": object()},
    ],
)
def test_invalid_manager_settings_are_refused(config: Any) -> None:
    assert taskd.api.init_taskd_manager(config) is False
    assert taskd.api.start_taskd_manager() is False


def test_manager_without_settings_does_not_start() -> None:
    assert taskd.api.start_taskd_manager() is False


def test_manager_settings_follow_dict_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_PROXY_ENABLE", "MINDX_SERVER_IP", "POD_IP", "TASKD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = {**GOOD, "taskd_enable": "on"}
    settings = manager_functions._settings(config)
    assert (settings.job_id, settings.listen, settings.clusterd) == (
        "job-1",
        "127.0.0.1:9601",
        "embedded",
    )
    assert (settings.job.nodes, settings.job.ranks_per_node, settings.job.rescheduling) == (
        2,
        8,
        False,
    )
    assert settings.plugin_dir == Path("/plugins")
    monkeypatch.setenv("POD_IP", "fd00::1")
    monkeypatch.setenv("MINDX_SERVER_IP", "clusterd.svc")
    settings = manager_functions._settings(config)
    assert (settings.listen, settings.clusterd) == ("[fd00::1]:9601", "clusterd.svc:8899")
    assert settings.job.rescheduling
    monkeypatch.setenv("LOCAL_PROXY_ENABLE", "on")
    settings = manager_functions._settings(config)
    assert (settings.listen, settings.clusterd) == ("127.0.0.1:9601", "127.0.0.1:8899")
    assert manager_functions._settings({**config, "taskd_enable": "off"}).clusterd == ""


# The worker


@pytest.mark.parametrize("arguments", [("0",), (True,), (-1,), (0, -1), (0, "5"), (0, 5.0)])
def test_invalid_worker_numbers_are_refused(
    arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert taskd.api.init_taskd_worker(*arguments) is False


@pytest.mark.parametrize(
    ("framework", "environment"),
    [
        ("pt", {}),
        ("pt", {"RANK": "0"}),
        ("pt", {"RANK": "0", "LOCAL_WORLD_SIZE": "0"}),
        ("pt", {"RANK": "-8", "LOCAL_WORLD_SIZE": "8"}),
        ("pt", {"RANK": "x", "LOCAL_WORLD_SIZE": "8"}),
        ("ms", {}),
        ("ms", {"MS_NODE_RANK": "-1"}),
        ("jax", {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "MS_NODE_RANK": "0"}),
    ],
)
def test_worker_without_a_node_rank_is_refused(
    framework: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MS_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert taskd.api.init_taskd_worker(0, 5000, framework) is False


@pytest.mark.parametrize(
    ("framework", "environment", "node"),
    [
        ("pt", {"RANK": "17", "LOCAL_WORLD_SIZE": "8"}, 2),
        ("ms", {"MS_NODE_RANK": "3"}, 3),
    ],
)
def test_worker_node_rank_is_read_from_the_environment(
    framework: str, environment: dict[str, str], node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert api_functions._node_rank(framework) == node


def test_missing_installation_is_not_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_functions, "WORKER", "taskd.worker.absent")
    monkeypatch.setattr(api_functions, "AGENT", "taskd.agent.absent")
    monkeypatch.setenv("MS_NODE_RANK", "0")
    assert taskd.api.init_taskd_worker(0, 5000, "ms") is False
    assert taskd.api.start_taskd_worker() is False
    assert taskd.api.destroy_taskd_worker() is False
    assert taskd.api.init_taskd_agent({"Framework": "MindSpore"}) is False
    assert taskd.api.start_taskd_agent() is None
    assert taskd.api.register_func("MONITOR", print) is False


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TASKD_PROCESS_ENABLE", "off", "TASKD_PROCESS_ENABLE is off"),
        ("TASKD_AGENT_JOIN_TIMEOUT_S", "soon", "TASKD_AGENT_JOIN_TIMEOUT_S must be float"),
    ],
)
def test_mindspore_agent_is_refused_and_the_reason_is_logged(
    name: str,
    value: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, value)
    assert not taskd.api.init_taskd_agent({"Framework": "MindSpore"})
    assert reason in caplog.text
