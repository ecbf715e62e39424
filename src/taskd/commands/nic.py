"""`taskd nic JOB --to backup|primary`: pauses training, moves links to the other NIC, resumes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import recover_pb2 as pb

ALL = "all"
TARGETS = {"backup": True, "primary": False}
DONE = "switch nic finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument("--rank", default=ALL, help="comma-separated ranks, or `all` (default)")
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="interface to use")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments, arguments.job) as server:
        status = server.call("Status", control.JobRequest(job=arguments.job))
        request = request_of(arguments.job, status.places, arguments.rank, TARGETS[arguments.to])
        server.start_operation("SwitchNicTrack", request)
        text = server.operation_result(
            "SubscribeSwitchNicSignal", pb.SwitchNicRequest(jobID=arguments.job)
        )
    sys.stdout.write(f"{text}\n")
    return 0 if text == DONE else 2


def request_of(
    job: str, places: Iterable[control.Place], ranks: str, to_backup: bool
) -> pb.SwitchNics:
    known = {place.rank: place for place in places}
    words = [word.strip() for word in ranks.split(",") if word.strip()]
    if words == [ALL]:
        words = [str(rank) for rank in sorted(known)]
    unknown = [word for word in words if not word.isdecimal() or int(word) not in known]
    if unknown or not words:
        expected = f"expected {min(known)} to {max(known)}" if known else "no rank is registered"
        problem = f"unknown rank {', '.join(unknown)}" if unknown else "no rank given"
        raise SettingsError([f"--rank: {problem} (job {job}: {expected})"])
    request = pb.SwitchNics(jobID=job)
    for rank in sorted(set(map(int, words))):
        place = known[rank]
        request.nicOps[place.node].dev.append(place.device)
        request.nicOps[place.node].op.append(to_backup)
    return request
