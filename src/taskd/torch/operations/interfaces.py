"""The network interfaces of this process: the one that its groups use, and the backup.

gloo gets a device that is bound to the interface, NCCL its environment variables. `transport.py`
asks here whenever a group is formed; `nic_switch.py` changes it. The bus and the store stay where
they are: a cluster's control network is not its training network.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from taskd import config
from taskd.errors import SettingsError
from taskd.torch import compat
from taskd.worker.settings import WorkerSettings

PRIMARY, BACKUP = 0, 1
SIOCGIFADDR = 0x8915
RTMGRP_LINK = 1
NETLINK_BYTES = 65536


class Nics:
    """The interfaces of this process, and the one in use."""

    def __init__(self, text: str, failover: bool = False, trial_s: float = 5.0) -> None:
        named = [word.strip() for word in text.split(",") if word.strip()]
        if len(named) > 2:
            raise SettingsError(
                [f"invalid TASKD_NICS={text!r}: expected a primary and at most one backup"]
            )
        self.names = [word.partition(":")[0] for word in named]
        self._adapters = [word.partition(":")[2] for word in named]
        self.side = PRIMARY
        self.failover = failover and len(named) == 2
        self.trial_s = trial_s
        self._configure_nccl()

    @property
    def name(self) -> str:
        """The interface in use; empty: the backend chooses."""
        return self.names[self.side] if self.names else ""

    def use(self, side: int) -> None:
        self.side = side
        self._configure_nccl()

    def problem(self, side: int) -> str:
        """Why that interface cannot be used; empty: it can."""
        if side >= len(self.names):
            return (
                "no backup interface is configured: see --nics"
                if side
                else "no interface is configured"
            )
        folder = Path("/sys/class/net", self.names[side])
        if not folder.exists():
            return f"interface {self.names[side]} does not exist"
        try:
            carrier = (folder / "carrier").read_text().strip()
        except OSError:
            carrier = "0"  # it cannot be read while the interface is down
        return "" if carrier == "1" else f"{self.names[side]} has no carrier"

    def address(self) -> str:
        """The address of the interface in use; empty if it is not known."""
        if not self.name:
            return ""
        request = struct.pack("256s", self.name.encode()[:15])
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            found = fcntl.ioctl(handle.fileno(), SIOCGIFADDR, request)
            return socket.inet_ntoa(found[20:24])
        return ""

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` whenever the kernel reports that the interface in use has no carrier."""
        kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        kernel.bind((0, RTMGRP_LINK))
        threading.Thread(
            target=self._listen, args=(kernel, on_lost), name="taskd-carrier", daemon=True
        ).start()

    def _listen(self, kernel: socket.socket, on_lost: Callable[[str], None]) -> None:
        with kernel:
            while True:
                try:
                    kernel.recv(NETLINK_BYTES)
                except OSError as error:
                    if error.errno != errno.ENOBUFS:  # the queue overflowed: something has changed
                        return
                problem = self.problem(self.side)
                if problem:
                    on_lost(problem)

    def _configure_nccl(self) -> None:
        if self.names:
            config.direct_nccl(self.names[self.side], self._adapters[self.side])


_current = Nics("")


def configure(settings: WorkerSettings) -> Nics:
    """Called once, before the first group is formed."""
    global _current
    _current = Nics(settings.nics, settings.nic_failover, settings.nic_trial_s)
    return _current


def current() -> Nics:
    return _current


def gloo_options(timeout: timedelta) -> Any | None:
    """For a gloo group on the interface in use; None: gloo chooses by itself."""
    return compat.gloo_options(timeout, _current.name) if _current.name else None
