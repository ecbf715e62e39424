"""The flags between an agent and the recover client of its process."""

from taskd.ascend.recover_flags import Flags as SharedData
from taskd.ascend.recover_flags import flags as shared_data_inst

__all__ = ["SharedData", "shared_data_inst"]
