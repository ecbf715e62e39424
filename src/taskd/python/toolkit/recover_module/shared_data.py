"""Documented import path of the flags that an agent shares with its recover client."""

from taskd.ascend.recover_client import Flags as SharedData
from taskd.ascend.recover_client import flags as shared_data_inst

__all__ = ["SharedData", "shared_data_inst"]
