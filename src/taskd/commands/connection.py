"""The connection of a command to its server: found, opened, and its errors told in our words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from taskd.bus.clusterd_tls import ClusterdTlsSettings, credentials, from_environment
from taskd.clusterd.locate import Place, find
from taskd.errors import PeerRefused, PeerUnreachable
from taskd.runtime.tokens import bearer
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

TIMEOUT_S = 10.0
AWAY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Connection:
    place: Place
    channel: grpc.Channel
    stub: Any
    trace: Any
    """The service that switches profiling."""
    recover: Any
    """The service that takes operations."""

    def call(self, method: str, request: Any) -> Any:
        return getattr(self.stub, method)(
            request, timeout=TIMEOUT_S, metadata=bearer(self.place.token)
        )

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        yield from getattr(self.stub, method)(request, metadata=bearer(self.place.token))

    def comes_back(self, within_s: float) -> bool:
        """Wait for a server that has gone away."""
        try:
            grpc.channel_ready_future(self.channel).result(within_s)
        except grpc.FutureTimeoutError:
            return False
        return True


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", default="", help="host:port of clusterd")
    parser.add_argument("--token", default="", help="or TASKD_CLUSTERD_TOKEN")
    parser.add_argument("--ca", default="", help="encrypt; the certificate that proves the server")
    parser.add_argument("--cert", default="", help="your own certificate, if the server wants one")
    parser.add_argument("--key", default="", help="the key of your certificate")


def _tls(arguments: argparse.Namespace, place: Place) -> ClusterdTlsSettings:
    if arguments.ca or arguments.cert or arguments.key:
        return ClusterdTlsSettings(ca=arguments.ca, crt=arguments.cert, key=arguments.key)
    # A job's own server, announced on this machine, is on the loopback.
    return ClusterdTlsSettings() if place.pid else from_environment()


@contextmanager
def connection(arguments: argparse.Namespace, job: str = "") -> Iterator[Connection]:
    place = find(job, arguments.server, arguments.token)
    encrypted = credentials(_tls(arguments, place))
    if encrypted is None:
        channel = grpc.insecure_channel(place.address)
    else:
        channel = grpc.secure_channel(place.address, encrypted)
    try:
        make: Any = ControlStub
        trace: Any = TrainingDataTraceStub
        recover: Any = RecoverStub
        yield Connection(place, channel, make(channel), trace(channel), recover(channel))
    except grpc.RpcError as error:
        told: Any = error
        kind = PeerUnreachable if told.code() in AWAY else PeerRefused
        raise kind(f"clusterd at {place.address}: {told.details()}") from error
    finally:
        channel.close()
