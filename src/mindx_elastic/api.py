"""Importing this patches torch's elastic agent, as image recipes rely on:

sed -i '/import os/i import mindx_elastic.api' .../torch/distributed/run.py
"""

from taskd.ascend.elastic_agent.torchrun_patch import patch_torch_methods

__all__ = ["patch_torch_methods"]

patch_torch_methods()
