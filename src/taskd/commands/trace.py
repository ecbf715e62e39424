"""`taskd trace JOB`: merges the records of all ranks into one file for Perfetto.

Reads the folders of `worker/profiling/record_files.py`, puts all ranks on one clock
(`core/worker/clock_alignment.py`), and draws one process per rank and one track per domain;
collectives that overlap get further tracks. chrome://tracing opens the file as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from taskd import config
from taskd.commands.replay import read_journal
from taskd.core.worker import clock_alignment as alignment
from taskd.core.worker.clock_alignment import Offset
from taskd.dashboard.incidents import Incident, brief, phase_durations
from taskd.dashboard.incidents import read as read_incidents
from taskd.errors import SettingsError
from taskd.runtime import json_text
from taskd.runtime.files.private_files import open_regular
from taskd.runtime.plain_text import one_line
from taskd.wire._pb.control_pb2 import ReplayRequest
from taskd.wire.json_reading import loads
from taskd.worker.profiling import records
from taskd.worker.profiling.record_files import base_dir
from taskd.worker.profiling.records import COMMUNICATION, DEVICE, Span
from taskd.worker.settings import ProfilingSettings

TOGETHER = {"allreduce", "allgather", "allgather_base", "alltoall", "alltoall_base", "barrier"}
"""In these, no rank can finish before all ranks have started."""
ABSOLUTE_S = 1e9
"""A time of at least this is Unix time; a smaller one counts from the first record."""
NS = 1_000_000_000
MOST_LINE = 1 << 20
"""Characters: a longer line is no record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument(
        "--from", dest="begin", type=float, help="seconds since the first record, or Unix time"
    )
    parser.add_argument("--to", dest="end", type=float, help="end of the range, in the same form")
    parser.add_argument(
        "--dir", action="append", type=Path, help="folder of a node's records; may be repeated"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="also draw the incidents in this journal (STATE_DIR/clusterd.journal)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write (default: JOB.trace.json; - for stdout)"
    )


def run(arguments: argparse.Namespace) -> int:
    settings = config.load(ProfilingSettings, prefix="TASKD_PROFILING")
    bases = arguments.dir or [base_dir(settings.dir)]
    ranks = read(bases, arguments.job)
    if not ranks:
        where = ", ".join(map(str, bases))
        raise SettingsError(
            [f"no records of job {arguments.job} in {where}: was `taskd profile` on?"]
        )
    merged, found = merge(ranks, arguments.begin, arguments.end, _incidents(arguments))
    text = json_text.dumps(merged, ascii_only=True, separators=json_text.SPACED)
    if str(arguments.output) == "-":
        sys.stdout.write(text + "\n")
        return 0
    target = arguments.output or Path(f"{arguments.job.replace('/', '_')}.trace.json")
    try:
        target.write_text(text)
    except OSError as error:
        raise SettingsError([f"cannot write {target}: {error.strerror}"]) from error
    sys.stdout.write(f"{target}: {len(merged['traceEvents'])} events, {_summary(found)}\n")
    return 0


def read(bases: Iterable[Path], job: str) -> dict[int, list[Span]]:
    """Read the records of each rank, in the order of their files."""
    ranks: dict[int, list[Span]] = {}
    for base in bases:
        if not (base / job).is_dir():
            continue
        try:
            for folder in sorted(path for path in (base / job).iterdir() if path.name.isdecimal()):
                ranks.setdefault(int(folder.name), []).extend(records.spans(_lines(folder)))
        except OSError as error:
            raise SettingsError([f"cannot read {error.filename}: {error.strerror}"]) from error
    return {rank: found for rank, found in sorted(ranks.items()) if found}


def merge(
    ranks: dict[int, list[Span]],
    begin: float | None = None,
    end: float | None = None,
    incidents: Sequence[Incident] = (),
) -> tuple[dict[str, Any], dict[int, Offset]]:
    found = alignment.offsets({rank: _shared(spans) for rank, spans in ranks.items()})
    aligned = {
        rank: [_shift(span, found[rank].ns) for span in spans] for rank, spans in ranks.items()
    }
    first = min(span.start_ns for spans in aligned.values() for span in spans)
    low, high = _moment(begin, first, 0), _moment(end, first, 1 << 63)
    events: list[dict[str, Any]] = []
    for rank, spans in aligned.items():
        within = [span for span in spans if span.end_ns >= low and span.start_ns <= high]
        events += _events(rank, within, first)
    if incidents:
        shown = [i for i in incidents if low <= i.lines[0].at_unix_ms * NS // 1000 <= high]
        events += _incident_events(max(aligned) + 1, shown, first)
    return {"traceEvents": events, "displayTimeUnit": "ms"}, found


def _lines(folder: Path) -> Iterator[str]:
    """Other users may write into the folder of a cluster: pipes and links are left out."""
    names = [name for name in os.listdir(folder) if name.isdecimal()]
    for name in sorted(names, key=int):
        try:
            descriptor = open_regular(folder / name)
        except OSError as error:
            sys.stderr.write(f"taskd trace: left out: {one_line(str(error))}\n")
            continue
        with open(descriptor, errors="replace") as file:
            while line := file.readline(MOST_LINE):
                yield line


def _shared(spans: Sequence[Span]) -> dict[Hashable, tuple[int, int]]:
    """Collectives by name. A name that occurs twice (its group was formed again) is left out."""
    together = [
        span
        for span in spans
        if span.domain == COMMUNICATION and str(_name(span).get("opName")) in TOGETHER
    ]
    times = Counter((span.name, span.source) for span in together)
    return {
        (span.name, span.source): (span.start_ns, span.end_ns)
        for span in together
        if times[span.name, span.source] == 1
    }


def _name(span: Span) -> dict[str, Any]:
    try:
        details = loads(span.name)
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _shift(span: Span, ns: int) -> Span:
    return span._replace(start_ns=span.start_ns - ns, end_ns=span.end_ns - ns) if ns else span


def _moment(seconds: float | None, first: int, default: int) -> int:
    if seconds is None:
        return default
    return int(seconds * NS) if seconds >= ABSOLUTE_S else first + int(seconds * NS)


def _events(rank: int, spans: list[Span], first: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    tracks = _Tracks()
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        details = _name(span) if span.domain == COMMUNICATION else {}
        yield {
            "ph": "X",
            "name": details.get("opName", span.name),
            "cat": span.domain,
            "pid": rank,
            "tid": tracks.of(span),
            "ts": (span.start_ns - first) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": details,
        }
    for track, name in tracks.names.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}


def _incidents(arguments: argparse.Namespace) -> list[Incident]:
    if arguments.journal is None:
        return []
    if not arguments.journal.exists():
        raise SettingsError([f"--journal: {arguments.journal} does not exist"])
    lines, problem = read_journal(arguments.journal, ReplayRequest(job=arguments.job))
    if problem:
        sys.stderr.write(f"taskd trace: {problem}\n")
    return read_incidents(lines)


def _incident_events(
    process: int, incidents: Sequence[Incident], first: int
) -> Iterator[dict[str, Any]]:
    """A process of its own: a span per incident, and its phases below."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": "incidents"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": -1}}
    for incident in incidents:
        known = brief(incident)
        at = (known["beganUnixMs"] * NS // 1000 - first) / 1000
        yield _incident_span(process, 1, known["title"], at, known["tookMs"], known["because"])
        for name, took_ms in phase_durations(incident).items():
            yield _incident_span(process, 2, name, at, took_ms, known["strategy"])
            at += took_ms * 1000


def _incident_span(
    process: int, track: int, name: str, at_us: float, took_ms: float, because: str
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": "incident",
        "pid": process,
        "tid": track,
        "ts": at_us,
        "dur": took_ms * 1000,
        "args": {"because": because},
    }


class _Tracks:
    """Chooses the track of each span: two spans on a track are disjoint or nested."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._ends: dict[str, list[list[int]]] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    def of(self, span: Span) -> int:
        base = span.domain if span.domain == COMMUNICATION else "training"
        if span.source == DEVICE:
            base = f"device {span.device} {base}"
        lanes = self._ends.setdefault(base, [])
        for number, stack in enumerate(lanes):
            while stack and stack[-1] <= span.start_ns:
                stack.pop()
            if not stack or span.end_ns <= stack[-1]:
                stack.append(span.end_ns)
                return self._number(base, number)
        lanes.append([span.end_ns])
        return self._number(base, len(lanes) - 1)

    def _number(self, base: str, lane: int) -> int:
        key = base, lane
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers) + 1
            self.names[self._numbers[key]] = base if not lane else f"{base} {lane + 1}"
        return self._numbers[key]


def _summary(found: dict[int, Offset]) -> str:
    moved = {rank: offset for rank, offset in found.items() if offset.ns}
    lost = [rank for rank, offset in found.items() if offset.within_ns < 0]
    text = f"{len(found)} ranks"
    if moved:
        shifts = ", ".join(f"rank {r} by {o.ns / 1e6:.3f} ms" for r, o in moved.items())
        text += f", clocks corrected: {shifts}"
    if lost:
        ranks = ", ".join(map(str, lost))
        text += f"; clock not corrected (no collective shared with rank {min(found)}): {ranks}"
    return text
