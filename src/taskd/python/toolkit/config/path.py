"""Places in the file system."""

import os

WORK_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CFG_DIR = os.path.join(WORK_DIR, "config")
LOG_CFG_FILE = os.path.join(CFG_DIR, "logger.yaml")
TORCH_EXTENSIONS_CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "torch_extensions")
