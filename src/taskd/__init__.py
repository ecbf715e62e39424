"""TaskD keeps a distributed training job training."""

from taskd.config import prepare_grpc
from taskd.version import __version__

__all__ = ["__version__"]

prepare_grpc()  # before any of our modules imports gRPC
