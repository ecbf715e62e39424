"""The import paths of the retired Elastic Agent. They only re-export parts of TaskD."""

from taskd.version import __version__

__all__ = ["__version__"]
