"""Importing this makes torchrun use TaskD's agent, as image recipes expect:

sed -i '/import os/i import mindx_elastic.api' .../torch/distributed/run.py
"""

from taskd.ascend.documented.torchrun_patch import patch_torch_methods

__all__ = ["patch_torch_methods"]

patch_torch_methods()
