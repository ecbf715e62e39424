"""Loads what stands behind a documented function, when it is first called."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def behind(module: str) -> Any:
    """The module, or None, with the reason in the log, if this installation lacks what it needs."""
    try:
        return import_module(module)
    except ImportError as error:
        from taskd.ascend.toolkit.run_log import run_log

        run_log.error("%s cannot be used in this installation: %s", module, error)
        return None
