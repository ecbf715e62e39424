"""Importing this lets torchrun's agents work with TaskD; it is the documented line in `run.py`."""

from taskd.ascend.documented.torch_patch import patch_torch_method

patch_torch_method()
