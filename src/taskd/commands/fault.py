"""`taskd fault JOB --rank 3 --kind process`: report by hand what no program has noticed."""

from __future__ import annotations

import argparse
import getpass
import sys

from taskd.commands.connection import add_server_arguments, connection
from taskd.commands.render import KINDS
from taskd.errors import PeerRefused
from taskd.wire._pb import control_pb2 as pb

TYPES = {name: number for number, name in KINDS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("--rank", type=int, action="append", required=True, help="may be repeated")
    parser.add_argument("--kind", choices=sorted(TYPES), default="process")
    parser.add_argument("--because", default="", help="what was seen")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    kind = TYPES[arguments.kind]
    faults = [
        pb.JobFault(rank=rank, fault_type=kind, evidence=arguments.because)
        for rank in arguments.rank
    ]
    request = pb.FaultReport(job=arguments.job, faults=faults, reporter=getpass.getuser())
    with connection(arguments, arguments.job) as server:
        answer = server.call("ReportFault", request)
    if answer.code:
        raise PeerRefused(f"{answer.code}: {answer.info}")
    sys.stdout.write(f"{answer.info}\n")
    return 0
