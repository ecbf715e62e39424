"""`taskd status [JOB]`: how a job is doing; with --watch, again whenever that changes."""

from __future__ import annotations

import argparse
import sys

from google.protobuf.json_format import MessageToJson

from taskd.clusterd.inspect import show
from taskd.clusterd.inspect.ask import Connection, add_server_arguments, connection
from taskd.edge.clock import wall
from taskd.wire._pb import control_pb2 as pb

CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="")
    parser.add_argument("--json", action="store_true", help="one JSON object a status")
    parser.add_argument("--watch", action="store_true", help="live, until interrupted")
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
        for told in server.stream("Watch", request):
            if not arguments.json and sys.stdout.isatty():
                sys.stdout.write(CLEAR)
            _print(told, arguments)
    return 0


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
