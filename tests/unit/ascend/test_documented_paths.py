"""All documented import paths, with their names and the exact values of constants."""

from __future__ import annotations

import ast
import os
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path

import pytest

import taskd
from taskd.model.codes import RecoverCode
from taskd.python.cython_api import cython_api
from taskd.python.framework.common import type as types
from taskd.python.framework.common.utils import (
    get_hccl_switch_nic_timeout,
    get_report_fault_timeout,
)
from taskd.python.toolkit.fault_checker.fault_check import FaultProcessor
from taskd.python.toolkit.recover_module.shared_data import SharedData
from taskd.python.toolkit.validator.file_process import safe_get_file_info

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PATHS = {
    "taskd": "__version__",
    "taskd.api": "init_taskd_manager start_taskd_manager init_taskd_worker start_taskd_worker "
    "destroy_taskd_worker init_taskd_agent start_taskd_agent register_func init_taskd_proxy "
    "destroy_taskd_proxy",
    "taskd.api.taskd_manager_api": "init_taskd_manager start_taskd_manager",
    "taskd.api.taskd_worker_api": "init_taskd_worker start_taskd_worker destroy_taskd_worker",
    "taskd.api.taskd_agent_api": "init_taskd_agent start_taskd_agent register_func",
    "taskd.api.taskd_proxy_api": "init_taskd_proxy destroy_taskd_proxy",
    "taskd.python.adaptor.patch.torch_patch": "patch_torch_method patch_invoke_run "
    "patch_default_signal patch_restart_workers patch_stop_workers stop_worker_task "
    "patch_start_workers start_processes_with_log_dir start_processes_with_logs_spec "
    "get_worker_env patch_monitor_workers context_wait_task get_use_agent_store "
    "patch_launch_agent patch_create_c10d_store_decorator",
    "taskd.python.framework.agent.base_agent.agent_network": "AgentMessageManager "
    "init_network_client init_message_manager get_message_manager network_send_message "
    "get_msg_network_instance",
    "taskd.python.framework.agent.base_agent.base_agent": "BaseAgent DEFAULT_DST DEFAULT_MSG_TYPE "
    "STATUS_MSG_TYPE",
    "taskd.python.framework.agent.pt_agent.pt_agent": "PtAgent get_pids get_fault_workers",
    "taskd.python.framework.agent.ms_agent.ms_agent": "MsAgent",
    "taskd.python.framework.agent.ms_mgr.msrun_plugin": "MSRunPlugin",
    "taskd.python.framework.agent.ms_mgr.ms_utils": "check_monitor_res_valid "
    "calculate_global_rank calculate_local_rank_by_global_rank",
    "taskd.python.framework.manager.manager": "Manager",
    "taskd.python.framework.worker.worker": "Worker StressStatus",
    "taskd.python.adaptor.pytorch.group_info": "get_save_path get_group_info dump_group_info",
    "taskd.python.cython_api.cython_api": "load_lib_taskd lib",
    "taskd.python.framework.common.type": "Position TLSConfig NetworkConfig MessageInfo MsgBody "
    "AgentReportInfo",
    "taskd.python.framework.common.utils": "get_hccl_switch_nic_timeout get_report_fault_timeout",
    "taskd.python.toolkit.config.path": "WORK_DIR CFG_DIR LOG_CFG_FILE TORCH_EXTENSIONS_CACHE_DIR",
    "taskd.python.toolkit.fault_checker.fault_check": "FaultProcessor FaultStatus ResetCmData "
    "fault_processor clean_before_restart grace_exit_pids force_exit_pids all_pid_stopped "
    "stop_pids",
    "taskd.python.toolkit.recover_module": "DLRecoverManager",
    "taskd.python.toolkit.recover_module.recover_manager": "DLRecoverManager RecoverManager "
    "ProtoBufData CallBackFuncs init_grpc_recover_manager init_grpc_client init_grpc_process "
    "init_mindio_controller register_callback_func get_instance get_recover_manager_instance "
    "report_stop_complete report_recover_strategy report_recover_status report_process_fault",
    "taskd.python.toolkit.recover_module.shared_data": "SharedData shared_data_inst",
    "taskd.python.toolkit.recover_module.pb.recover_pb2": "ClientInfo Status FaultRank "
    "ProcessManageSignal",
    "taskd.python.toolkit.recover_module.pb.recover_pb2_grpc": "RecoverStub RecoverServicer "
    "add_RecoverServicer_to_server",
    "taskd.python.toolkit.validator.file_process": "safe_get_file_info",
    "taskd.python.utils.ip": "pre_handle_ip",
    "taskd.python.utils.ip.ip": "pre_handle_ip",
    "taskd.python.utils.log": "run_log",
    "taskd.python.utils.log.logger": "run_log CustomRotatingHandler MaxLengthFormatter LogConfig",
    "taskd.python.utils.validator": "Validator FileValidator StringValidator DirectoryValidator "
    "IntValidator MapValidator RankSizeValidator ClassValidator",
    "taskd.python.utils.validator.validators": "Validator FileValidator StringValidator "
    "DirectoryValidator IntValidator MapValidator RankSizeValidator ClassValidator",
    "taskd.python.constants.constants": "LOG_DEFAULT_FILE DEFAULT_GROUP_DIR TASKD_LOG_PATH "
    "MUSK_PRIVILEGE LOG_BACKUP_FORMAT LOG_BACKUP_PATTERN CHECK_STEP_PERIOD GROUP_INFO_KEY",
    "taskd.python.toolkit.constants.constants": "RESET_CONFIG_PATH RESTARTTIMESCODE TTP_PORT "
    "MIN_RANK_SIZE MAX_RANK_SIZE MIN_DEVICE_NUM MAX_DEVICE_NUM MIN_SIZE MAX_SIZE MAX_CKPT_NUMS "
    "LOG_PRIVILEGE LOG_DIR_PRIVILEGE LOG_BAK_PRIVILEGE LOG_MAX_LINE_LENGTH LOG_SIMPLE_FORMAT "
    "LOG_FILE_PATH_ENV RESTART_FAULT_PROCESS_TYPE_ENV TASKD_PROCESS_ENABLE TASKD_ENABLE "
    "ELASTIC_TRAINING SWITCH_ON SWITCH_OFF STOPAGENTCODE GRPC_KEEPALIVE_TIME_MS "
    "GRPC_KEEPALIVE_TIMEOUT_MS GRPC_KEEPALIVE_PERMIT_WITHOUT_CALLS GRPC_MAX_PINGS_WITHOUT_DATA "
    "GRPC_SSL_TARGET_NAME_OVERRIDE",
    "mindx_elastic": "__version__",
    "mindx_elastic.pb": "ClientInfo Status",
    "mindx_elastic.log": "run_log",
    "mindx_elastic.recover_manager": "DLRecoverManager report_stop_complete "
    "report_recover_strategy report_recover_status report_process_fault",
}

VALUES = {
    "taskd.python.framework.common.type": {
        "LOCAL_HOST": "127.0.0.1",
        "CONFIG_UPSTREAMIP_KEY": "UpstreamAddr",
        "CONFIG_LISTENIP_KEY": "ListenAddr",
        "CONFIG_UPSTREAMPORT_KEY": "UpstreamPort",
        "CONFIG_LISTENPORT_KEY": "ListenPort",
        "CONFIG_ROLE_KEY": "Role",
        "CONFIG_SERVERRANK_KEY": "ServerRank",
        "CONFIG_PROCESSRANK_KEY": "ProcessRank",
        "CONFIG_FRAMEWORK_KEY": "Framework",
        "DEFAULT_PROXY_UPSTREAMPORT": "9601",
        "DEFAULT_PRXOY_LISTENPORT": "9602",
        "DEFAULT_AGENT_UPSTREAMPORT": "9602",
        "DEFAULT_PROXY_ROLE": "Proxy",
        "DEFAULT_AGENT_ROLE": "Agent",
        "DEFAULT_SERVERRANK": "0",
        "DEFAULT_PROCESSRANK": "-1",
        "DEFAULT_BIZTYPE": "DEFAULT",
    },
    "taskd.python.toolkit.constants.constants": {
        "SLEEP_GAP": 5,
        "GRACE_TIME_OUT": 600,
        "WAITING_INTERVAL": 5,
        "WAIT_TIMES": 2,
        "INIT_TIMEOUT": 900,
        "INIT_RESET_CHANGE_TIMEOUT": 120,
        "WAITING_RESET_CHANGE_INTERVAL": 1,
        "KILL_INTERVAL": 60,
        "RELEASE_INTERVAL": 15,
        "MONITOR_INTERVAL": 1,
        "INIT_NETWORK_TIMEOUT": 180,
        "SEND_RETRY_TIMES": 3,
        "MAX_INI16": 32767,
        "MAX_INT16": 32767,
        "GRPC_REGISTER_RETRY_TIME_LIMIT": 3,
        "HIGH_AVAILABILITY_SWITCH_CHECK_TIMEOUT": 600,
        "MAX_CONNECT_GAP": 10,
        "SWITCH_NIC_DEFAULT_TIMEOUT": 600,
        "SWITCH_NIC_MAX_TIMEOUT": 7200,
        "MINDX_START_CONTROLLER_RANK": -1,
        "MAX_FILE_SIZE": 1024 * 1024,
        "GRPC_SERVER_PORT": "8899",
        "LOCAL_PROXY_IP": "127.0.0.1",
        "AGENTPAUSESTARTTRAINCODE": 211,
        "LOG_BAK_PRIVILEGE": 0o400,
        "KILL_ALL_WORKER_CALLBACK_NAME": "KILL_WORKER",
    },
    "taskd.python.constants.constants": {
        "LOG_MAX_LINE_LENGTH": 1023,
        "LOG_DEFAULT_BACKUP_COUNT": 30,
        "LOG_DEFAULT_MAX_BYTES": 20 * 1024 * 1024,
        "LOG_DIR_PRIVILEGE": 0o750,
        "LOG_PRIVILEGE": 0o640,
        "MAX_RANK_SIZE": 4095,
        "MAX_DEVICE_NUM": 4096,
        "LOG_BAK_PRIVILEGE": 0o440,
        "GROUP_INFO_NAME": "parallel_group.json",
        "StressTestInit": -1,
        "StressTestOK": 0,
        "StressTestExecFail": 1,
        "StressTestFindFault": 2,
        "StressTestTimeout": 3,
        "StressTestVolRecoverFail": 4,
        "AicStressTestTimeout": 300,
        "P2PStressTestTimeout": 600,
    },
}


@pytest.mark.parametrize(("path", "names"), PATHS.items(), ids=PATHS)
def test_documented_names_exist(path: str, names: str) -> None:
    module = import_module(path)
    missing = [name for name in names.split() if not hasattr(module, name)]
    assert not missing


def test_documented_packages_only_reexport() -> None:
    source = Path(taskd.__file__).parents[1]
    folders = ("taskd/api", "taskd/python", "mindx_elastic")
    modules = [path for folder in folders for path in sorted((source / folder).rglob("*.py"))]
    with_code = [
        path.stem
        for path in modules
        if any(isinstance(node, DEFINITIONS) for node in ast.parse(path.read_text()).body)
    ]
    assert with_code == ["cython_api"], "only the loader of the library beside it has code"


@pytest.mark.parametrize(("path", "values"), VALUES.items(), ids=VALUES)
def test_documented_values(path: str, values: dict[str, object]) -> None:
    module = import_module(path)
    assert {name: getattr(module, name) for name in values} == values


def test_constant_that_a_program_sets_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "taskd.python.toolkit.constants.constants.RESET_CONFIG_PATH", "/elsewhere/reset.json"
    )
    assert FaultProcessor().reset_cm_path == "/elsewhere/reset.json"


def test_dataclass_fields_have_their_documented_order() -> None:
    order = {
        types.Position: "role server_rank process_rank",
        types.TLSConfig: "ca server_key server_crt client_key client_crt",
        types.NetworkConfig: "pos upstream_addr listen_addr enable_tls tls_conf",
        types.MessageInfo: "uuid biz_type dst body",
        types.MsgBody: "msg_type code message extension",
        types.AgentReportInfo: "fault_ranks restart_times",
    }
    for kind, names in order.items():
        assert [field.name for field in fields(kind)] == names.split()
    assert asdict(types.AgentReportInfo()) == {"fault_ranks": [], "restart_times": -1}


def test_documented_recover_codes_exist() -> None:
    documented = [0, *range(400, 409), 499, *range(500, 510), 599]
    assert set(documented) <= {int(code) for code in RecoverCode}


@pytest.mark.parametrize(
    ("text", "seconds"), [("300", 300), ("600", 600), ("299", -1), ("601", -1), ("x", -1), ("", -1)]
)
def test_report_fault_timeout_accepts_300_to_600_seconds(
    text: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_REPORT_FAULT_TIMEOUT", text)
    assert get_report_fault_timeout() == seconds


def test_switch_nic_timeout_is_two_and_a_half_connect_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "101")
    assert get_hccl_switch_nic_timeout() == 252


def test_only_small_regular_text_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("中")
    assert safe_get_file_info(str(file)) == "中"
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "large").write_bytes(bytes(1024 * 1024 + 1))
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "link", "binary", "large", "pipe", ".", "\0"):
        assert safe_get_file_info(f"{tmp_path}/{name}") == "", name
    assert safe_get_file_info(None) == ""  # type: ignore[arg-type]


def test_watchers_are_called_when_a_flag_is_raised() -> None:
    flags, seen = SharedData(), []
    with flags.watched(lambda: seen.append((flags.get_exit_flag(), flags.get_kill_flag()))):
        flags.set_exit_flag(True)
        flags.set_exit_flag(False)
        flags.set_kill_flag(True)
    flags.set_exit_flag(True)
    assert seen == [(True, False), (False, True)]


def test_missing_or_linked_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cython_api, "PATH", tmp_path / "libtaskd.so")
    assert cython_api.load_lib_taskd() is None
    (tmp_path / "libtaskd.so").symlink_to("/lib/x86_64-linux-gnu/libc.so.6")
    assert cython_api.load_lib_taskd() is None
