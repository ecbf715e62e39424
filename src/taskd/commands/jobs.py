"""`taskd jobs`: every job that the server serves, one a line."""

from __future__ import annotations

import argparse
import sys

from google.protobuf.json_format import MessageToJson

from taskd.commands import render as show
from taskd.commands.connection import add_server_arguments, connection
from taskd.wire._pb import control_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments) as server:
        told = server.call("Jobs", pb.JobsRequest())
    text = MessageToJson(told, indent=None) if arguments.json else show.jobs(told.jobs)
    sys.stdout.write(text + "\n")
    return 0
