"""The manager functions of `taskd.api` and the class `Manager`, on top of `taskd.manager`."""

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
    """Check and store the settings. Returns False if they are invalid.

    The first valid settings stay; later ones are checked but not used. As documented, the
    environment sets two keys in the caller's dict: `fault_recover` (PROCESS_RECOVER=on) and
    `taskd_enable` ("on", unless TASKD_PROCESS_ENABLE=off).
    """
    global _config
    from taskd.ascend.documented.run_log import run_log

    problems = _completed(config)
    if problems:
        run_log.error("the manager's settings are invalid: %s", "; ".join(problems))
        return False
    if _config is None:
        _config = dict(config)
    return True


def start_taskd_manager() -> bool:
    """Serve the job until it ends; True if it ended well.

    Returns False at once if the manager is not initialised or cannot listen.
    """
    from taskd.ascend.documented.run_log import run_log

    if _config is None:
        run_log.error("the manager is not initialised: call init_taskd_manager first")
        return False
    from taskd.manager.main import serve
    from taskd.runtime.log import also_to

    also_to("manager.log", backups=10)
    try:
        return serve(_settings(_config)) == 0
    except (TaskdError, ValueError) as error:
        run_log.error("the manager did not start: %s", error)
        return False


def _settings(config: dict[str, Any]) -> ManagerConfig:
    """The manager's own settings, from the documented dict and environment variables."""
    from pathlib import Path

    from taskd.ascend.recover_channel import LOOPBACK, server_address
    from taskd.bus.security import membership, tls_of
    from taskd.core.manager.states import JobConfig
    from taskd.manager.settings import EMBEDDED, PORT, ManagerConfig, is_mindspore
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
        clusterd_token_file=environ.get("TASKD_CLUSTERD_TOKEN_FILE", ""),
        plugin_dir=Path(config["plugin_dir"]) if config.get("plugin_dir") else None,
        job=JobConfig(
            nodes=config.get("node_nums", 1),
            ranks_per_node=config.get("proc_per_node", 1),
            rescheduling=has_cluster,
            mindspore=is_mindspore(environ),
        ),
    )


def _completed(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return [f"expected a dict, got {type(config).__name__}"]
    if environ.get("PROCESS_RECOVER") == "on":
        config["fault_recover"] = "on"
    config["taskd_enable"] = "off" if environ.get("TASKD_PROCESS_ENABLE") == "off" else "on"
    problems = [
        f"{name} must be a string, got {config[name]!r}"
        for name in TEXTS
        if not isinstance(config.get(name) or "", str)
    ]
    problems += [
        f"{name} must be an integer of at least 1, got {config[name]!r}"
        for name in COUNTS
        if not _is_count(config.get(name, 1))
    ]
    if not _are_infos(config.get("cluster_infos", [])):
        problems.append("cluster_infos must be a list of {ip, port, name, role}, or one of them")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        problems.append(f"they cannot be written as JSON: {error}")
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_infos(infos: Any) -> bool:
    """Accepts both a dict, as documented, and a list, as MindCluster's own manager takes."""
    if isinstance(infos, dict):
        return all(isinstance(value, str) for value in infos.values())
    return isinstance(infos, list | tuple) and all(
        isinstance(info, dict) and _are_infos(info) for info in infos
    )


class Manager:
    """The documented class with the same two functions. One per process."""

    def __init__(self) -> None:
        self.config: dict[str, Any] | None = None

    def init_taskd_manager(self, config: dict[str, Any]) -> bool:
        accepted = init_taskd_manager(config)
        if accepted:
            self.config = config
        return accepted

    def start_taskd_manager(self) -> bool:
        """Blocks while it serves the job."""
        return start_taskd_manager()

    def start_controller(self) -> None:
        """Does nothing: the manager itself starts MindIO's controller where it is installed."""
        from taskd.ascend.documented.run_log import run_log
        from taskd.ascend.mindio import has_mindio

        if not has_mindio():
            run_log.info("mindio_ttp is not installed: TaskD repairs the ranks without it")
