"""The client of clusterd's Recover service."""

from taskd.ascend.documented.recover_manager import DLRecoverManager

__all__ = ["DLRecoverManager"]
