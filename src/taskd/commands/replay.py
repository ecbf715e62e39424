"""`taskd replay JOB`: shows each incident: every decision with its time and its reason.

Reads from the server, or, if no server runs, from the journal file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from taskd.clusterd.services.control_service import history_line
from taskd.commands import render
from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.runtime.journal import Journal
from taskd.wire._pb import control_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument("--incident", type=int, default=0, help="show only this incident")
    parser.add_argument("--json", action="store_true", help="print one JSON object per decision")
    parser.add_argument(
        "--journal", type=Path, help="read this journal; no server may have it open"
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = pb.ReplayRequest(job=arguments.job, incident=arguments.incident)
    if arguments.journal is not None:
        if not arguments.journal.exists():
            raise SettingsError([f"--journal: {arguments.journal} does not exist"])
        lines = asyncio.run(_from_file(arguments.journal, request))
    else:
        with connection(arguments, arguments.job) as server:
            lines = list(server.stream("Replay", request))
    if arguments.json:
        text = [render.as_json(line) for line in lines]
    else:
        text = list(render.history(lines)) or [f"no decisions for {arguments.job} yet"]
    sys.stdout.writelines(f"{line}\n" for line in text)
    return 0


async def _from_file(path: Path, request: pb.ReplayRequest) -> list[pb.HistoryLine]:
    journal = Journal(path)
    try:
        entries = await journal.history(request.job, request.incident)
    finally:
        await journal.aclose()
    return [history_line(entry) for entry in entries]
