"""Documented import path of `taskd.ascend.documented.init_proxy`."""

from taskd.ascend.documented.init_proxy import (
    destroy_taskd_proxy,
    init_taskd_proxy,
)

__all__ = [
    "destroy_taskd_proxy",
    "init_taskd_proxy",
]
