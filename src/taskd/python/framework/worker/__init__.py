"""Documented import path of `Worker` and `StressStatus`."""
