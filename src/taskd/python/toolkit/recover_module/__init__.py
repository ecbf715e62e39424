"""The client of clusterd's Recover service."""

from taskd.python.toolkit.recover_module.recover_manager import DLRecoverManager

__all__ = ["DLRecoverManager"]
