"""`taskd profile JOB on|off`: starts or stops recording; `taskd status` shows what is recorded."""

from __future__ import annotations

import argparse
import sys

from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import PeerRefused, SettingsError
from taskd.model.codes import TraceCode
from taskd.model.profiling import EVERYTHING, KEYS, Part, words_of
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import profiling_pb2 as pb

DOMAINS = dict(zip(words_of(EVERYTHING), Part, strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument("switch", choices=("on", "off"))
    parser.add_argument(
        "--domains",
        default=",".join(DOMAINS),
        help=f"comma-separated list: {', '.join(DOMAINS)} (default: all)",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    chosen = [] if arguments.switch == "off" else arguments.domains.split(",")
    unknown = [word for word in chosen if word not in DOMAINS]
    if unknown:
        expected = ", ".join(DOMAINS)
        raise SettingsError([f"--domains: unknown {', '.join(unknown)} (expected {expected})"])
    parts = Part(sum(DOMAINS[word] for word in set(chosen)))
    switch = pb.ProfilingSwitch(**{key: "on" if KEYS[key] & parts else "off" for key in KEYS})
    with connection(arguments, arguments.job) as server:
        line = server.call("Status", control.JobRequest(job=arguments.job)).line
        request = pb.DataTypeReq(
            jobNsName=f"{line.namespace or 'default'}/{line.name}", profilingSwitch=switch
        )
        answer = server.switch_profiling(request)
    if answer.code != TraceCode.OK:
        raise PeerRefused(f"{answer.code}: {answer.message}")
    sys.stdout.write(f"recording {', '.join(words_of(parts)) or 'off'}, from the next step on\n")
    return 0
