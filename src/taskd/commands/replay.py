"""`taskd replay JOB`: shows each incident: every decision with its time and its reason.

Reads from the server, or, if no server runs, from the journal file. With --html it writes a report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

from taskd.clusterd.services.control_service import history_line
from taskd.commands import render
from taskd.commands.connection import Connection, add_server_arguments, connection, plain
from taskd.errors import SettingsError
from taskd.runtime.clock import wall
from taskd.runtime.journal.journal_reader import read_history
from taskd.wire._pb import control_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument("--incident", type=int, default=0, help="show only this incident")
    parser.add_argument(
        "--messages", action="store_true", help="also show what each decision was based on and sent"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per decision")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report to this file, for any browser"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="read this journal file instead of a server; the file is not changed",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = pb.ReplayRequest(job=arguments.job, incident=arguments.incident)
    status, problem = None, ""
    if arguments.journal is not None:
        if not arguments.journal.exists():
            raise SettingsError([f"--journal: {arguments.journal} does not exist"])
        lines, problem = read_journal(arguments.journal, request)
    else:
        with connection(arguments, arguments.job) as server:
            lines = list(server.stream("Replay", request))
            if arguments.html:
                status = _status(server, arguments.job)
    if problem:
        sys.stderr.write(f"taskd replay: {problem}\n")
    if arguments.html:
        return _write_report(arguments, lines, status, problem)
    if arguments.json:
        text = [render.as_json(line) for line in lines]
    else:
        text = list(render.history(lines, arguments.messages)) or [
            f"no decisions for {arguments.job} yet"
        ]
    sys.stdout.writelines(f"{line}\n" for line in text)
    return 0


def _write_report(
    arguments: argparse.Namespace,
    lines: list[pb.HistoryLine],
    status: pb.JobStatus | None,
    problem: str,
) -> int:
    from taskd.dashboard import report

    data = report.data_of(arguments.job, lines, round(wall() * 1000), status, problem)
    try:
        arguments.html.write_text(report.page(data), encoding="utf-8", errors="replace")
    except OSError as error:
        raise SettingsError([f"cannot write {arguments.html}: {error.strerror}"]) from error
    sys.stdout.write(f"{arguments.html}: {len(data['incidents'])} incidents\n")
    return 0


def _status(server: Connection, job: str) -> pb.JobStatus | None:
    """None: the job has ended, and only its history is left."""
    try:
        status: pb.JobStatus = server.call("Status", pb.JobRequest(job=job))
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return None
    return status


def read_journal(path: Path, request: pb.ReplayRequest) -> tuple[list[pb.HistoryLine], str]:
    """The history, and what is wrong with the file if only a part could be read."""
    entries, problem = read_history(path, request.job, request.incident)
    return [plain(history_line(entry)) for entry in entries], problem
