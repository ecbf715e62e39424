"""`taskd profile JOB on|off`: record a running job, or stop that. `taskd status` shows which."""

from __future__ import annotations

import argparse
import sys

from taskd.commands.connection import TIMEOUT_S, add_server_arguments, connection
from taskd.errors import PeerRefused, SettingsError
from taskd.model.codes import TraceCode
from taskd.model.profiling import KEYS, Part, names_of
from taskd.runtime.tokens import bearer
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import profiling_pb2 as pb

WORDS = {
    "communication": "CommunicationOperator",
    "step": "Step",
    "forward": "FP",
    "data": "DataLoader",
    "save": "SaveCheckpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("switch", choices=("on", "off"))
    parser.add_argument(
        "--domains", default=",".join(WORDS), help=f"comma list of {', '.join(WORDS)}; all of them"
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    wanted = [] if arguments.switch == "off" else arguments.domains.split(",")
    unknown = [word for word in wanted if word not in WORDS]
    if unknown:
        raise SettingsError([f"--domains: {', '.join(unknown)} is none of {', '.join(WORDS)}"])
    named = {WORDS[word] for word in wanted}
    switch = pb.ProfilingSwitch(**{key: "on" if key in named else "off" for key in KEYS})
    with connection(arguments, arguments.job) as server:
        line = server.call("Status", control.JobRequest(job=arguments.job)).line
        request = pb.DataTypeReq(
            jobNsName=f"{line.namespace or 'default'}/{line.name}", profilingSwitch=switch
        )
        answer = server.trace.ModifyTrainingDataTraceSwitch(
            request, timeout=TIMEOUT_S, metadata=bearer(server.place.token)
        )
    if answer.code != TraceCode.OK:
        raise PeerRefused(f"{answer.code}: {answer.message}")
    parts = Part(sum(KEYS[key] for key in named))
    sys.stdout.write(f"recording {', '.join(names_of(parts)) or 'off'}, from the next step on\n")
    return 0
