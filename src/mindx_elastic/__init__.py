"""The names of the retired Elastic Agent, on top of TaskD."""

from taskd.version import __version__

__all__ = ["__version__"]
