"""TaskD keeps a distributed training job training."""

from taskd.version import __version__

__all__ = ["__version__"]
