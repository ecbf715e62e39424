"""Puts one hook behind all optimizers of torch when it is imported: a step has ended.

`taskd run` imports it before the script runs, so the script need not change. What happens then is
in `worker/profiling/profiler.py`. After its first step the process also writes down which devices
it sees, for the node's standby (`worker/visible_devices.py`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from taskd import config
from taskd.errors import SettingsError
from taskd.torch.profiling.step_recorder import TorchHooks
from taskd.worker import visible_devices
from taskd.worker.profiling.profiler import StepEndHook

WARM_UP = "taskd.torch.startup.warmup"

_hook = StepEndHook(TorchHooks())
_has_reported = False


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _has_reported
    _hook.step_ended(id(optimizer))
    if not _has_reported:
        _has_reported = True
        _report_devices()


def _report_devices() -> None:
    warmup = sys.modules.get(WARM_UP)
    if warmup is not None and warmup.driver_has_other_devices():
        names = " or ".join(visible_devices.VARIABLES[:2])
        raise SettingsError(
            [
                f"the script has set {names} in this process, but not in the ranks before it: the "
                "driver had started already and uses other devices. Set it for all ranks of the "
                "node, or in the environment of `taskd run`"
            ]
        )
    if path := config.environ.get("TASKD_DEVICES_FILE"):
        with suppress(OSError):  # without it, the standby does not start the driver
            visible_devices.write_report(Path(path), config.environ, _device_use())


def _device_use() -> visible_devices.DeviceUse | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    free, total = torch.cuda.mem_get_info()
    return visible_devices.DeviceUse(torch.cuda.current_device(), free / total)


def _in_child() -> None:
    global _hook, _has_reported
    _has_reported = False
    _hook.hooks.remove()
    _hook = StepEndHook(TorchHooks())


register_optimizer_step_post_hook(_after_step)
os.register_at_fork(after_in_child=_in_child)
