"""`taskd status [JOB]`: shows the state of a job; with --watch, again after each change.

A watch ends when the job does. It survives restarts of the server.
"""

from __future__ import annotations

import argparse
import sys

import grpc

from taskd.clusterd.locate import is_withdrawn
from taskd.commands import render
from taskd.commands.connection import UNREACHABLE, Connection, add_server_arguments, connection
from taskd.errors import PeerUnreachable
from taskd.runtime.clock import wall
from taskd.wire._pb import control_pb2 as pb

CLEAR = "\x1b[H\x1b[2J"
RETURN_S = 30.0
"""How long a watch waits for a server that has gone away."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="id of the job (default: the only one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per status")
    parser.add_argument(
        "--watch", action="store_true", help="print after each change, until the job ends"
    )
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
        sys.stdout.write(f"job {job} has ended" + (f": {because}" if because else "") + "\n")
    return 0


def _watch(server: Connection, request: pb.JobRequest, arguments: argparse.Namespace) -> str:
    """Print each status until the job ends; return why it ended, if that is known."""
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
                return ""  # the job ended while the server was away
            if last is None or code not in UNREACHABLE:
                raise
        if is_withdrawn(server.place):
            return ""
        if not server.wait_until_back(RETURN_S):
            raise PeerUnreachable(
                f"lost clusterd at {server.place.address}; the job may still be running"
            )


def _all(server: Connection, arguments: argparse.Namespace) -> int:
    """No job is named and none is announced here: show the server's only job, or list all."""
    reply = server.call("Jobs", pb.JobsRequest())
    if len(reply.jobs) == 1:
        _print(server.call("Status", pb.JobRequest(job=reply.jobs[0].job)), arguments)
    else:
        text = render.as_json(reply) if arguments.json else render.jobs(reply.jobs)
        sys.stdout.write(text + "\n")
    return 0


def _print(status: pb.JobStatus, arguments: argparse.Namespace) -> None:
    now_ms = round(wall() * 1000)
    text = render.as_json(status) if arguments.json else render.status(status, now_ms)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
