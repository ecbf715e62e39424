"""Documented import path of the messages of `recover.proto`, generated in `taskd.wire`."""

from taskd.wire._pb.recover_pb2 import *  # noqa: F403
