"""Documented import path of the paths of the toolkit."""

import os

from taskd.ascend.documented.reset_files import TORCH_EXTENSIONS_CACHE_DIR

__all__ = ["CFG_DIR", "LOG_CFG_FILE", "TORCH_EXTENSIONS_CACHE_DIR", "WORK_DIR"]

WORK_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CFG_DIR = os.path.join(WORK_DIR, "config")
LOG_CFG_FILE = os.path.join(CFG_DIR, "logger.yaml")
