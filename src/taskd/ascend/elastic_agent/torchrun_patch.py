"""Importing this patches torch's elastic agent, as image recipes rely on:

sed -i '/import os/i import mindx_elastic.api' .../torch/distributed/run.py
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from taskd.ascend.elastic_agent.elastic_log import run_log
from taskd.config import environ


def patch_torch_methods() -> None:
    """Let torchrun start, watch and replace the workers through TaskD's agent.

    With ELASTIC_PROCESS_RECOVER_ENABLE set to anything but 1, torchrun stays as it is.
    """
    if find_spec("torch") is None:
        raise ImportError(
            "mindx_elastic.api changes how torch starts its workers, and torch is not installed"
        )
    switch = environ.get("ELASTIC_PROCESS_RECOVER_ENABLE", "1")
    if switch != "1":
        told = "ELASTIC_PROCESS_RECOVER_ENABLE is %r, not 1: torchrun is left as it is"
        run_log.warning(told, switch)
        return
    import_module("taskd.ascend.documented.torch_patch").patch_torch_method()
