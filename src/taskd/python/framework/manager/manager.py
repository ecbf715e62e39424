"""Documented import path of `Manager`."""

from taskd.ascend.documented.manager_functions import Manager

__all__ = ["Manager"]
