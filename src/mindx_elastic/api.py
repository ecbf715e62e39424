"""Importing this patches torch's elastic agent, as image recipes rely on:

sed -i '/import os/i import mindx_elastic.api' .../torch/distributed/run.py
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec


def patch_torch_methods() -> None:
    """Let torchrun start, watch and replace the workers through TaskD's agent."""
    if find_spec("torch") is None:
        raise ImportError(
            "mindx_elastic.api changes how torch starts its workers, and torch is not installed"
        )
    import_module("taskd.python.adaptor.patch.torch_patch").patch_torch_method()


patch_torch_methods()
