"""Importing this lets torchrun's agents work with TaskD; it is the documented line in `run.py`."""

from taskd.python.adaptor.patch.torch_patch import patch_torch_method

patch_torch_method()
