"""The service of `recover.proto`, generated once, in `taskd.wire`."""

from taskd.wire._pb.recover_pb2_grpc import *  # noqa: F403
