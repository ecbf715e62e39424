"""`taskd replay JOB`: every incident retold, with the reason of each decision and its time.

From the server, or, when no server runs, from the journal itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from google.protobuf.json_format import MessageToJson

from taskd.clusterd.services.control_service import history_line
from taskd.commands import render as show
from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.runtime.journal import Journal
from taskd.wire._pb import control_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("--incident", type=int, default=0, help="only this one")
    parser.add_argument("--json", action="store_true", help="one JSON object a decision")
    parser.add_argument("--journal", type=Path, help="read this file; no server may be using it")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = pb.ReplayRequest(job=arguments.job, incident=arguments.incident)
    if arguments.journal is not None:
        if not arguments.journal.exists():
            raise SettingsError([f"there is no journal {arguments.journal}"])
        lines = asyncio.run(_from_file(arguments.journal, request))
    else:
        with connection(arguments, arguments.job) as server:
            lines = list(server.stream("Replay", request))
    if arguments.json:
        text = [MessageToJson(line, indent=None) for line in lines]
    else:
        text = list(show.history(lines)) or [f"nothing was decided for {arguments.job} yet"]
    sys.stdout.write("\n".join(text) + "\n")
    return 0


async def _from_file(path: Path, request: pb.ReplayRequest) -> list[pb.HistoryLine]:
    journal = Journal(path)
    try:
        entries = await journal.history(request.job, request.incident)
    finally:
        await journal.aclose()
    return [history_line(entry) for entry in entries]
