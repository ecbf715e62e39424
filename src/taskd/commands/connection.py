"""The connection of a command to clusterd: finds the server, opens a channel, translates errors."""

from __future__ import annotations

import argparse
import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from taskd.bus.security import (
    ClusterdTlsSettings,
    clusterd_credentials,
    clusterd_tls_from_environment,
)
from taskd.clusterd.locate import Place, find
from taskd.errors import PeerRefused, PeerUnreachable
from taskd.model.codes import RecoverCode
from taskd.runtime.plain_text import one_line
from taskd.runtime.tokens import bearer
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

TIMEOUT_S = 10.0
OPERATION_TIMEOUT_S = 2 * 15 * 60.0
"""Longer than clusterd itself waits for an operation."""
UNREACHABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Connection:
    place: Place
    channel: grpc.Channel

    def call(self, method: str, request: Any) -> Any:
        return self._unary(ControlStub, method, request)

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        stub: Any = ControlStub
        for reply in getattr(stub(self.channel), method)(request, metadata=self._token()):
            yield plain(reply)

    def switch_profiling(self, request: Any) -> Any:
        return self._unary(TrainingDataTraceStub, "ModifyTrainingDataTraceSwitch", request)

    def start_operation(self, method: str, request: Any) -> None:
        """Raises PeerRefused, with clusterd's code and reason, unless the operation starts."""
        answer = self._unary(RecoverStub, method, request)
        if answer.code != RecoverCode.OK:
            raise PeerRefused(f"{answer.code}: {answer.info}")

    def operation_result(self, method: str, request: Any) -> str:
        """Wait for the end of the operation and return clusterd's message about it."""
        stub: Any = RecoverStub
        replies: Iterator[Any] = getattr(stub(self.channel), method)(
            request, timeout=OPERATION_TIMEOUT_S, metadata=self._token()
        )
        for reply in replies:
            return one_line(str(reply.msg))
        raise PeerRefused("clusterd closed the stream before it sent the result of the operation")

    def wait_until_back(self, within_s: float) -> bool:
        """Wait for a server that has gone away; False if it does not return in time."""
        try:
            grpc.channel_ready_future(self.channel).result(within_s)
        except grpc.FutureTimeoutError:
            return False
        return True

    def _unary(self, stub: Any, method: str, request: Any) -> Any:
        send = getattr(stub(self.channel), method)
        return plain(send(request, timeout=TIMEOUT_S, metadata=self._token()))

    def _token(self) -> Any:
        return bearer(self.place.token)


def plain(message: Any) -> Any:
    """The message with its texts made safe for a terminal: tenants have written many of them."""
    for described, value in message.ListFields():
        if described.type == described.TYPE_STRING:
            if isinstance(value, str):
                setattr(message, described.name, one_line(value))
            else:
                value[:] = map(one_line, value)
        elif described.type == described.TYPE_MESSAGE:
            for one in [value] if isinstance(value, Message) else value:
                plain(one)
    return message


def user_name() -> str:
    """For the journal. In a container a user need not have a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"user {os.getuid()}"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="", help="host:port of clusterd (default: TASKD_CLUSTERD)"
    )
    parser.add_argument("--token", default="", help="access token (default: TASKD_CLUSTERD_TOKEN)")
    parser.add_argument(
        "--ca", default="", help="encrypt, and verify the server with this CA certificate"
    )
    parser.add_argument("--cert", default="", help="client certificate, if the server asks for one")
    parser.add_argument("--key", default="", help="private key of the client certificate")


def tls_of(arguments: argparse.Namespace, place: Place) -> ClusterdTlsSettings:
    if arguments.ca or arguments.cert or arguments.key:
        return ClusterdTlsSettings(ca=arguments.ca, crt=arguments.cert, key=arguments.key)
    # The server of a job that was announced on this machine listens on loopback, without TLS.
    return ClusterdTlsSettings() if place.pid else clusterd_tls_from_environment()


@contextmanager
def connection(arguments: argparse.Namespace, job: str = "") -> Iterator[Connection]:
    place = find(job, arguments.server, arguments.token)
    encrypted = clusterd_credentials(tls_of(arguments, place))
    if encrypted is None:
        channel = grpc.insecure_channel(place.address)
    else:
        channel = grpc.secure_channel(place.address, encrypted)
    try:
        yield Connection(place, channel)
    except grpc.RpcError as error:
        failure: Any = error
        kind = PeerUnreachable if failure.code() in UNREACHABLE else PeerRefused
        raise kind(f"clusterd at {place.address}: {one_line(failure.details() or '')}") from error
    finally:
        channel.close()
