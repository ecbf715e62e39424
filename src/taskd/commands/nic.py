"""`taskd nic JOB --rank … --to backup|primary`: training pauses, links move, training goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from taskd.commands import operate
from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import recover_pb2 as pb

ALL = "all"
WAYS = {"backup": True, "primary": False}
DONE = "switch nic finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("--rank", default=ALL, help="comma list of ranks, or `all`")
    parser.add_argument("--to", choices=tuple(WAYS), required=True)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments, arguments.job) as server:
        told = server.call("Status", control.JobRequest(job=arguments.job))
        request = request_of(arguments.job, told.places, arguments.rank, WAYS[arguments.to])
        operate.ask(server, "SwitchNicTrack", request)
        text = operate.outcome(
            server, "SubscribeSwitchNicSignal", pb.SwitchNicRequest(jobID=arguments.job)
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
    strange = [word for word in words if not word.isdecimal() or int(word) not in known]
    if strange or not words:
        there = f"there are {min(known)} to {max(known)}" if known else "no rank is known there"
        raise SettingsError(
            [f"--rank: {', '.join(strange) or 'nothing'} is no rank of {job}: {there}"]
        )
    request = pb.SwitchNics(jobID=job)
    for rank in sorted(set(map(int, words))):
        place = known[rank]
        request.nicOps[place.node].dev.append(place.device)
        request.nicOps[place.node].op.append(to_backup)
    return request
