"""Documented import path of `pre_handle_ip`."""

from taskd.ascend.documented.validators import pre_handle_ip

__all__ = ["pre_handle_ip"]
