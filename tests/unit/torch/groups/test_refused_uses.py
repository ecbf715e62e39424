"""What a repair could not renew is refused when it begins, with the reason."""

from __future__ import annotations

import subprocess
import sys

SYMMETRIC = """
import torch
import torch.distributed as dist
from taskd.errors import SettingsError
from taskd.torch.groups.refused_uses import refuse_symmetric_memory
import torch.distributed._symmetric_memory as symmetric

refuse_symmetric_memory()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for use in (
    lambda: symmetric.empty(4, dtype=torch.float32, device="cpu"),
    lambda: symmetric.rendezvous(torch.zeros(4), dist.group.WORLD),
):
    try:
        use()
    except SettingsError as error:
        print(error)
dist.destroy_process_group()
"""


def test_symmetric_memory_is_refused_where_it_is_allocated_and_where_peers_meet() -> None:
    """In a process of its own: it stays refused."""
    done = subprocess.run([sys.executable, "-c", SYMMETRIC], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("symmetric memory") == 2, done.stdout
