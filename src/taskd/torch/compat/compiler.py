"""torch.compile, in ranks and in the standby."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from taskd import config
from taskd.runtime.private_names import private_names

NAMES = (
    *private_names("torch._dynamo.utils", "counters", "noticing that a script is compiled"),
    *private_names("torch._inductor.config", "compile_threads", "compiling in one process"),
)
"""Checked in the trial of an untested torch only: its modules take seconds to import."""


def compile_in_process() -> None:
    """Let inductor compile without a pool of other processes, unless the user wants one."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    if config.compile_in_process() and inductor is not None:
        inductor.compile_threads = 1


def trace_and_forget() -> None:
    """Trace a small model with torch.compile, without generating code. Leaves nothing behind."""
    import torch._dynamo.utils

    model: Any = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
