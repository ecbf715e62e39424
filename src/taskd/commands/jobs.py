"""`taskd jobs`: lists the jobs of the server, one per line."""

from __future__ import annotations

import argparse
import sys

from taskd.commands import render
from taskd.commands.connection import add_server_arguments, connection
from taskd.wire._pb import control_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments) as server:
        reply = server.call("Jobs", pb.JobsRequest())
    text = render.as_json(reply) if arguments.json else render.jobs(reply.jobs)
    sys.stdout.write(text + "\n")
    return 0
