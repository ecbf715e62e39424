"""Documented import path of `Worker` and `StressStatus`."""

from taskd.ascend.documented.api_functions import StressStatus, Worker

__all__ = ["StressStatus", "Worker"]
