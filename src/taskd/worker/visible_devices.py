"""Which devices a node's ranks see, so that a standby knows what it may start in advance.

A driver reads these variables once, when it starts. Some scripts set them in their first lines, and
a process whose driver runs already would then use the wrong devices. So each rank writes down what
it saw after its first step, and a standby starts the driver only if all ranks of the node saw
exactly what the standby sees. If they all use one device, the standby makes itself ready on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from taskd.wire.json_reading import loads

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
PREFIXES = ("CUDA_", "CUBLAS_", "CUDNN_", "PYTORCH_")
"""Variables that are read when a device is first used: they may change its results."""
LEAST_FREE = 0.1
"""A standby takes half a gigabyte of the device. The ranks must have this share of it to spare."""

Devices = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The device that a rank has used in its first step."""

    device: int
    free: float
    """The share of its memory that nothing uses."""


def seen(environ: Mapping[str, str]) -> Devices:
    return {name: environ.get(name) for name in VARIABLES}


def write_report(path: Path, environ: Mapping[str, str], use: DeviceUse | None = None) -> None:
    """Complete or not at all: a standby may read at any moment."""
    unfinished = path.with_suffix(".new")
    report = {"seen": seen(environ), "read": _read_at_first_use(environ)}
    unfinished.write_text(json.dumps({**report, "use": None if use is None else asdict(use)}))
    unfinished.replace(path)


def may_start_driver(reports: Iterable[Path], environ: Mapping[str, str]) -> bool | None:
    """None: some ranks have not reported yet."""
    own, known = seen(environ), True
    for path in reports:
        try:
            report = loads(path.read_text())
        except FileNotFoundError:
            known = False
            continue
        if report["seen"] != own:
            return False
    return True if known else None


def common_device(reports: Iterable[Path], environ: Mapping[str, str]) -> int | None:
    """The one device that all ranks of the node use, if a standby may use it, too."""
    found = [loads(path.read_text()) for path in reports]
    own = _read_at_first_use(environ)
    if any(report["use"] is None or report["read"] != own for report in found):
        return None
    uses = [DeviceUse(**report["use"]) for report in found]
    devices = {use.device for use in uses}
    has_room = all(use.free >= LEAST_FREE for use in uses)
    return devices.pop() if len(devices) == 1 and has_room else None


def _read_at_first_use(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES)}
