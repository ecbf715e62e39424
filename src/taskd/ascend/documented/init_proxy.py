"""`init_taskd_proxy` and `destroy_taskd_proxy`, on top of `taskd.proxy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from taskd.config import environ
from taskd.errors import TaskdError


def init_taskd_proxy(config: Mapping[str, Any] | None = None) -> bool:
    """Run this process's proxy, and wait, for ever if need be, until it has joined the manager.

    Every key may be missing: ListenAddr, ListenPort, UpstreamAddr, UpstreamPort, ServerRank, and
    for encryption enable_tls with tls_conf. A second call waits for the proxy that is there.
    False: the settings are wrong, the port is taken (the log says it), or it was destroyed.
    """
    from taskd import proxy
    from taskd.ascend.toolkit.run_log import run_log
    from taskd.bus.security import tls_of

    try:
        wanted = proxy.ProxyConfig.of(config or {}, environ)
        return proxy.start(replace(wanted, tls=tls_of(config or {})))
    except (AttributeError, TaskdError) as error:
        run_log.error("the proxy has not started: %s", error)
        return False


def destroy_taskd_proxy() -> bool:
    """End the proxy, also one that is still joining. True as well if there is none."""
    from taskd import proxy
    from taskd.ascend.toolkit.run_log import run_log

    try:
        proxy.stop()
    except (TaskdError, TimeoutError) as error:
        run_log.error("the proxy has not ended: %s", error)
        return False
    return True
