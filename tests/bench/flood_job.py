"""The same flood as in `flood.py`, against the manager of a job that trains."""

from __future__ import annotations

from tests.bench.flood import measure_job
from tests.bench.rows import Row


def measure() -> list[Row]:
    return measure_job()
