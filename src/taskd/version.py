"""The one place that knows the version; the build and the command line read it here."""

__version__ = "0.1.0"
