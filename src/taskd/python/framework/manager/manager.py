"""Documented import path of `taskd.ascend.documented.manager_class`."""

from taskd.ascend.documented.manager_class import (
    Manager,
)

__all__ = [
    "Manager",
]
