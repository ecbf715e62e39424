"""`init_taskd_manager` and `start_taskd_manager`, on top of `taskd.manager`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from taskd.config import environ
from taskd.errors import TaskdError

if TYPE_CHECKING:
    from taskd.manager.settings import ManagerConfig

TEXTS = ("job_id", "plugin_dir", "fault_recover", "taskd_enable")
COUNTS = ("node_nums", "proc_per_node")

_config: dict[str, Any] | None = None


def init_taskd_manager(config: dict[str, Any]) -> bool:
    """Check and keep the settings; the first that are accepted stay. False: they are wrong.

    As documented, `fault_recover` and `taskd_enable` are set in the caller's dict from the
    environment: PROCESS_RECOVER=on, and TASKD_PROCESS_ENABLE unless it is off.
    """
    global _config
    from taskd.ascend.toolkit.run_log import run_log

    problems = _completed(config)
    if problems:
        run_log.error("the manager's settings are wrong: %s", "; ".join(problems))
        return False
    if _config is None:
        _config = dict(config)
    return True


def start_taskd_manager() -> bool:
    """Serve the job: blocks until it has ended, and says whether it ended well. False at once:
    not initialised, or it cannot listen."""
    from taskd.ascend.toolkit.run_log import run_log

    if _config is None:
        run_log.error("the manager is not initialised: call init_taskd_manager first")
        return False
    from taskd.manager.main import serve
    from taskd.runtime.log import also_to

    also_to("manager.log", backups=10)
    try:
        return serve(_settings(_config)) == 0
    except (TaskdError, ValueError) as error:
        run_log.error("the manager has not started: %s", error)
        return False


def _settings(config: dict[str, Any]) -> ManagerConfig:
    """The documented dict and variables, as the manager wants them."""
    from pathlib import Path

    from taskd.ascend.recover_channel import LOOPBACK, server_address
    from taskd.bus.security import membership, tls_of
    from taskd.core.manager.states import JobConfig
    from taskd.manager.settings import EMBEDDED, PORT, ManagerConfig
    from taskd.runtime.address import Address

    local = environ.get("LOCAL_PROXY_ENABLE") == "on"
    host = LOOPBACK if local else environ.get("POD_IP") or LOOPBACK
    has_cluster = local or bool(environ.get("MINDX_SERVER_IP"))
    if config["taskd_enable"] == "off":
        clusterd = ""
    else:
        clusterd = server_address() if has_cluster else EMBEDDED
    job, token = membership(environ)
    return ManagerConfig(
        job_id=config.get("job_id") or job or "job",
        listen=str(Address(host.strip("[]"), PORT)),
        token=token,
        tls=tls_of(config),
        clusterd=clusterd,
        clusterd_token=environ.get("TASKD_CLUSTERD_TOKEN", ""),
        plugin_dir=Path(config["plugin_dir"]) if config.get("plugin_dir") else None,
        job=JobConfig(
            nodes=config.get("node_nums", 1),
            ranks_per_node=config.get("proc_per_node", 1),
            rescheduling=has_cluster,
        ),
    )


def _completed(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return [f"they must be a dict, got {type(config).__name__}"]
    if environ.get("PROCESS_RECOVER") == "on":
        config["fault_recover"] = "on"
    config["taskd_enable"] = "off" if environ.get("TASKD_PROCESS_ENABLE") == "off" else "on"
    problems = [
        f"{name} must be a text, got {config[name]!r}"
        for name in TEXTS
        if not isinstance(config.get(name, ""), str)
    ]
    problems += [
        f"{name} must be a number, got {config[name]!r}"
        for name in COUNTS
        if not isinstance(config.get(name, 0), int) or isinstance(config.get(name), bool)
    ]
    if not _are_infos(config.get("cluster_infos", [])):
        problems.append("cluster_infos must be a list of {ip, port, name, role}, or one of them")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        problems.append(f"they have no JSON form: {error}")
    return problems


def _are_infos(infos: Any) -> bool:
    """The documentation says a dict, MindCluster's own manager takes a list: both will do."""
    if isinstance(infos, dict):
        return all(isinstance(value, str) for value in infos.values())
    return isinstance(infos, list | tuple) and all(
        isinstance(info, dict) and _are_infos(info) for info in infos
    )
