"""`taskd status [JOB]`: how a job is doing; with --watch, again whenever that changes.

A watch lasts until the job is over. It outlives restarts of the server.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from google.protobuf.json_format import MessageToJson

from taskd.clusterd.locate import is_withdrawn
from taskd.commands import render as show
from taskd.commands.connection import AWAY, Connection, add_server_arguments, connection
from taskd.errors import PeerUnreachable
from taskd.runtime.clock import wall
from taskd.wire._pb import control_pb2 as pb

CLEAR = "\x1b[H\x1b[2J"
RETURN_S = 30.0
"""How long a watch waits for a server that has gone away."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="")
    parser.add_argument("--json", action="store_true", help="one JSON object a status")
    parser.add_argument("--watch", action="store_true", help="live, until the job ends")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments, arguments.job) as server:
        job = arguments.job or server.place.job
        if not job:
            return _all(server, arguments)
        request = pb.JobRequest(job=job)
        if not arguments.watch:
            _print(server.call("Status", request), arguments)
            return 0
        because = _watch(server, request, arguments)
    if not arguments.json:
        sys.stdout.write(f"job {job} is over" + (f": {because}" if because else "") + "\n")
    return 0


def _watch(server: Connection, request: pb.JobRequest, arguments: argparse.Namespace) -> str:
    """Until the job is over; why it is, where that was heard."""
    last: pb.JobStatus | None = None
    while True:
        try:
            for last in server.stream("Watch", request):
                if not arguments.json and sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                _print(last, arguments)
            return last.line.because if last else ""
        except grpc.RpcError as error:
            code = error.code()
            if last is not None and code is grpc.StatusCode.NOT_FOUND:
                return ""  # it ended while the server was away
            if last is None or code not in AWAY:
                raise
        if is_withdrawn(server.place):
            return ""
        if not server.comes_back(RETURN_S):
            raise PeerUnreachable(f"clusterd at {server.place.address} is gone; the job may run on")


def _all(server: Connection, arguments: argparse.Namespace) -> int:
    """No job named, none announced: the only one there is, or the list."""
    listed = server.call("Jobs", pb.JobsRequest()).jobs
    if len(listed) == 1:
        _print(server.call("Status", pb.JobRequest(job=listed[0].job)), arguments)
    else:
        sys.stdout.write(show.jobs(listed) + "\n")
    return 0


def _print(told: pb.JobStatus, arguments: argparse.Namespace) -> None:
    text = MessageToJson(told, indent=None) if arguments.json else show.status(told, _now_ms())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _now_ms() -> int:
    return round(wall() * 1000)
