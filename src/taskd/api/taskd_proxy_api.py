"""Documented import path of the proxy functions of `taskd.api`."""

from taskd.ascend.documented.api_functions import destroy_taskd_proxy, init_taskd_proxy

__all__ = ["destroy_taskd_proxy", "init_taskd_proxy"]
