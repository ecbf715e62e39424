"""Importing this makes torchrun use TaskD's agent: the documented line in torch's `run.py`."""

from taskd.ascend.documented.torchrun_patch import patch_torch_method

patch_torch_method()
