"""Keeps the keys of one attempt of a job apart from those of another.

torch 2.13 lets restarted workers meet under the very keys that the dead ones left in the agent's
store, and they then wait for addresses that nobody answers at any more. Here every attempt has
a prefix of its own. (A new store in the place of the old one would do on one node only: on
several, a worker that restarts first would meet the store that is about to go.)
"""

from __future__ import annotations

import sys
from typing import Any

from taskd.config import environ


def keep_apart() -> None:
    """To be called in the zygote, once torch is imported."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    make_store = getattr(rendezvous, "_create_c10d_store", None)
    if make_store is None:
        return
    from torch._C._distributed_c10d import PrefixStore

    def make_store_of_attempt(*arguments: Any, **options: Any) -> PrefixStore:
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"taskd/attempt_{attempt}", make_store(*arguments, **options))

    rendezvous._create_c10d_store = make_store_of_attempt
