"""Documented import path of `taskd.ascend.msrun.msrun_plugin`."""

from taskd.ascend.msrun.msrun_plugin import (
    FIRST_NODE,
    NEEDED,
    SETTLE_S,
    MSRunPlugin,
    Next,
    Round,
    decide,
)

__all__ = [
    "FIRST_NODE",
    "NEEDED",
    "SETTLE_S",
    "MSRunPlugin",
    "Next",
    "Round",
    "decide",
]
