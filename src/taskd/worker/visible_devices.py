"""Which devices a node's ranks see, so that a standby knows whether it may start their driver.

A driver reads these variables once, when it starts. Some scripts set them in their first lines, and
a process whose driver runs already would then use the wrong devices. So each rank writes down what
it saw after its first step, and a standby starts the driver only if all ranks of the node saw
exactly what the standby sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)

Devices = dict[str, str | None]


def seen(environ: Mapping[str, str]) -> Devices:
    return {name: environ.get(name) for name in VARIABLES}


def write_report(path: Path, environ: Mapping[str, str]) -> None:
    """Complete or not at all: a standby may read at any moment."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(seen(environ)))
    unfinished.replace(path)


def may_start_driver(reports: Iterable[Path], environ: Mapping[str, str]) -> bool | None:
    """None: some ranks have not reported yet."""
    own, known = seen(environ), True
    for path in reports:
        try:
            report = json.loads(path.read_text())
        except FileNotFoundError:
            known = False
            continue
        if report != own:
            return False
    return True if known else None
