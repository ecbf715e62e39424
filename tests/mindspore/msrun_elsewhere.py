"""`msrun` with the cluster's reset files in the folder RESET_FILES instead of under `/user`."""

from __future__ import annotations

import os

from mindspore.parallel.cluster.run import main

from taskd.python.toolkit.constants import constants

if __name__ == "__main__":
    folder = os.environ["RESET_FILES"]
    constants.RESET_CONFIG_PATH = f"{folder}/reset.json"
    constants.RESTART_TYPE_PATH = f"{folder}/restartType"
    constants.RANK_TABLE_VERSION_PATH = f"{folder}/version"
    main()
