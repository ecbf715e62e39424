"""The messages of `recover.proto`, generated once, in `taskd.wire`."""

from taskd.wire._pb.recover_pb2 import *  # noqa: F403
