"""Loads what stands behind a documented function, when it is first called."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def behind(module: str) -> Any:
    """The module, or None, with the reason in the log, if this installation lacks it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        from taskd.python.utils.log import run_log

        run_log.error("%s is not part of this installation: %s", module, error)
        return None
