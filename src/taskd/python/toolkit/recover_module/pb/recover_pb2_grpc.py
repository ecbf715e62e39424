"""Documented import path of the service of `recover.proto`, generated in `taskd.wire`."""

from taskd.wire._pb.recover_pb2_grpc import *  # noqa: F403
