"""`taskd fault JOB --rank 3 --kind process`: report a fault that no program has detected."""

from __future__ import annotations

import argparse
import sys

from taskd.commands.connection import add_server_arguments, connection, user_name
from taskd.commands.render import KINDS
from taskd.errors import PeerRefused
from taskd.wire._pb import control_pb2 as pb

TYPES = {name: number for number, name in KINDS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument(
        "--rank", type=int, action="append", required=True, help="faulty rank; may be repeated"
    )
    parser.add_argument(
        "--kind",
        choices=sorted(TYPES),
        default="process",
        help="what has failed (default: %(default)s)",
    )
    parser.add_argument("--because", default="", help="what you observed; shown in the history")
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="repair nothing: write an emergency checkpoint and end the job",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    kind = TYPES[arguments.kind]
    faults = [
        pb.JobFault(rank=rank, fault_type=kind, evidence=arguments.because)
        for rank in arguments.rank
    ]
    request = pb.FaultReport(
        job=arguments.job,
        faults=faults,
        reporter=user_name(),
        checkpoint=arguments.checkpoint,
    )
    with connection(arguments, arguments.job) as server:
        answer = server.call("ReportFault", request)
    if answer.code:
        raise PeerRefused(f"{answer.code}: {answer.info}")
    sys.stdout.write(f"{answer.info}\n")
    return 0
