"""How many seeds a simulator tries: a third in `make test-fast`, all of them in `make explore`."""

from __future__ import annotations

import os

PART = 1 if "TASKD_ALL_SEEDS" in os.environ else 3


def seeds(count: int) -> range:
    return range(count // PART)
