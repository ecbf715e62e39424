"""The documented name behind `import taskd.python.adaptor.patch`, for `taskd.agent.torchrun`."""

from __future__ import annotations

from importlib.util import find_spec


def patch_torch_method() -> None:
    """Let torchrun use TaskD's agent. Without torch, or with a torch that is not known, nothing."""
    if find_spec("torch") is None:
        return
    from taskd.agent.torchrun import install

    install()
