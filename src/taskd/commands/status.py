"""`taskd status [JOB]`: shows the state of a job; with --watch, again after each change.

A watch ends when the job does. It survives restarts of the server.
"""

from __future__ import annotations

import argparse
import sys
from shutil import get_terminal_size

import grpc

from taskd.clusterd.locate import is_withdrawn
from taskd.commands import render
from taskd.commands.connection import UNREACHABLE, Connection, add_server_arguments, connection
from taskd.commands.watch_view import Terminal, screen
from taskd.config import environ
from taskd.dashboard.incidents import Incident
from taskd.dashboard.incidents import read as read_incidents
from taskd.errors import PeerUnreachable
from taskd.runtime.clock import wall
from taskd.wire._pb import control_pb2 as pb

CLEAR = "\x1b[H\x1b[2J"
RETURN_S = 30.0
"""How long a watch waits for a server that has gone away."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="id of the job (default: the only one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per status")
    parser.add_argument(
        "--watch", action="store_true", help="print after each change, until the job ends"
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with connection(arguments, arguments.job) as server:
        job = arguments.job or server.place.job
        if not job:
            return _all(server, arguments)
        request = pb.JobRequest(job=job)
        if not arguments.watch:
            _print(server.call("Status", request), arguments)
            return 0
        because = _watch(server, request, arguments)
    if not arguments.json:
        sys.stdout.write(f"job {job} has ended" + (f": {because}" if because else "") + "\n")
    return 0


def _watch(server: Connection, request: pb.JobRequest, arguments: argparse.Namespace) -> str:
    """Print each status until the job ends; return why it ended, if that is known."""
    last: pb.JobStatus | None = None
    history = _History(server, request.job)
    while True:
        try:
            for last in server.stream("Watch", request):
                if not arguments.json and is_screen():
                    history.read(last)
                    _draw(last, history.found)
                else:
                    _print(last, arguments)
            return last.line.because if last else ""
        except grpc.RpcError as error:
            code = error.code()
            if last is not None and code is grpc.StatusCode.NOT_FOUND:
                return ""  # the job ended while the server was away
            if last is None or code not in UNREACHABLE:
                raise
        if is_withdrawn(server.place):
            return ""
        if not server.wait_until_back(RETURN_S):
            raise PeerUnreachable(
                f"lost clusterd at {server.place.address}; the job may still be running"
            )


class _History:
    """The incidents of the job, read again when clusterd says that there is something new."""

    def __init__(self, server: Connection, job: str) -> None:
        self._server, self._job = server, job
        self._read_at = -1
        self.found: list[Incident] = []

    def read(self, status: pb.JobStatus) -> None:
        if status.history != self._read_at:
            lines = self._server.stream("Replay", pb.ReplayRequest(job=self._job))
            self.found = read_incidents(lines)
            self._read_at = status.history


def is_screen() -> bool:
    """Whether the output goes to a terminal that can be cleared."""
    return sys.stdout.isatty() and environ.get("TERM", "") not in ("", "dumb")


def _draw(status: pb.JobStatus, found: list[Incident]) -> None:
    size = get_terminal_size()
    terminal = Terminal(size.columns, size.lines, not environ.get("NO_COLOR"))
    sys.stdout.write(CLEAR + screen(status, found, round(wall() * 1000), terminal) + "\n")
    sys.stdout.flush()


def _all(server: Connection, arguments: argparse.Namespace) -> int:
    """No job is named and none is announced here: show the server's only job, or list all."""
    reply = server.call("Jobs", pb.JobsRequest())
    if len(reply.jobs) == 1:
        _print(server.call("Status", pb.JobRequest(job=reply.jobs[0].job)), arguments)
    else:
        text = render.as_json(reply) if arguments.json else render.jobs(reply.jobs)
        sys.stdout.write(text + "\n")
    return 0


def _print(status: pb.JobStatus, arguments: argparse.Namespace) -> None:
    now_ms = round(wall() * 1000)
    text = render.as_json(status) if arguments.json else render.status(status, now_ms)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
