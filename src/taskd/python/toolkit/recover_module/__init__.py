"""Documented import path of the client of clusterd's Recover service."""

from taskd.ascend.documented.recover_functions import DLRecoverManager

__all__ = ["DLRecoverManager"]
