"""The network interfaces of this process: the one that carries its groups, and the other one.

gloo is given a device of its own, NCCL its variables. `transport.py` asks here whenever a group is
formed; `switch.py` changes it. The bus and the store stay where they are: a cluster's control
network is not its training network.
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

import torch.distributed as dist

from taskd import config
from taskd.errors import SettingsError
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
            raise SettingsError([f"TASKD_NICS names a primary and a backup, got {text!r}"])
        self.names = [word.partition(":")[0] for word in named]
        self._adapters = [word.partition(":")[2] for word in named]
        self.side = PRIMARY
        self.failover = failover and len(named) == 2
        self.trial_s = trial_s
        self._direct()

    @property
    def name(self) -> str:
        """Empty: the backend chooses."""
        return self.names[self.side] if self.names else ""

    def to(self, side: int) -> None:
        self.side = side
        self._direct()

    def problem(self, side: int) -> str:
        """Why that interface cannot be used; empty if nothing speaks against it."""
        if side >= len(self.names):
            return "no backup interface is named: see --nics" if side else "no interface is named"
        there = Path("/sys/class/net", self.names[side])
        if not there.exists():
            return f"there is no interface {self.names[side]}"
        try:
            carrier = (there / "carrier").read_text().strip()
        except OSError:
            carrier = "0"  # the kernel refuses to read it while the interface is down
        return "" if carrier == "1" else f"{self.names[side]} has no carrier"

    def address(self) -> str:
        """Of the interface in use; empty when it is not known."""
        if not self.name:
            return ""
        request = struct.pack("256s", self.name.encode()[:15])
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
            return socket.inet_ntoa(found[20:24])
        return ""

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call back whenever the interface in use has lost its carrier. The kernel tells us."""
        kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        kernel.bind((0, RTMGRP_LINK))
        threading.Thread(
            target=self._listen, args=(kernel, lost), name="taskd-carrier", daemon=True
        ).start()

    def _listen(self, kernel: socket.socket, lost: Callable[[str], None]) -> None:
        with kernel:
            while True:
                try:
                    kernel.recv(NETLINK_BYTES)
                except OSError as error:
                    if error.errno != errno.ENOBUFS:  # we were too slow: something has changed
                        return
                problem = self.problem(self.side)
                if problem:
                    lost(problem)

    def _direct(self) -> None:
        if self.names:
            config.direct_nccl(self.names[self.side], self._adapters[self.side])


_chosen = Nics("")


def setup(settings: WorkerSettings) -> Nics:
    """Called once, before the first group is formed."""
    global _chosen
    _chosen = Nics(settings.nics, settings.nic_failover, settings.nic_trial_s)
    return _chosen


def chosen() -> Nics:
    return _chosen


def gloo_options(timeout: timedelta) -> Any | None:
    """For a gloo group on the interface in use; None: gloo chooses by itself."""
    if not _chosen.name:
        return None
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_chosen.name)]
    options._threads = 2
    return options
