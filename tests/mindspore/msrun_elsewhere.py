"""`msrun` with the cluster's reset files in the folder RESET_FILES instead of under `/user`.

No other node has to notice the end of this one's workers, so the plugin waits only 1 s for that.
"""

from __future__ import annotations

import os

from mindspore.parallel.cluster.run import main

from taskd.ascend.documented import msrun_reset_plugin
from taskd.python.toolkit.constants import constants

if __name__ == "__main__":
    folder = os.environ["RESET_FILES"]
    constants.RESET_CONFIG_PATH = f"{folder}/reset.json"
    constants.RESTART_TYPE_PATH = f"{folder}/restartType"
    constants.RANK_TABLE_VERSION_PATH = f"{folder}/version"
    msrun_reset_plugin.SETTLE_S = 1
    main()
