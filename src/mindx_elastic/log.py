"""Documented import path of the Elastic Agent's log."""

from taskd.ascend.documented.elastic_log import run_log

__all__ = ["run_log"]
