"""Import it before a Trainer is created: accelerate then shards with FSDP2 on the CPU, too.

accelerate 1.15 reads its FSDP plugin for accelerators only. On the CPU it leaves it out without a
word, and trains with DDP.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def install() -> None:
    """Once per process; a standby has done it for the ranks that it becomes."""
    plain: Any = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin

    AcceleratorState.__init__ = init


install()
