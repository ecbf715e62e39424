"""`taskd trace JOB`: the records of all ranks in one file for Perfetto or chrome://tracing.

Reads the directories of `disk.py`, puts all ranks on one clock
(`core/worker/clock_alignment.py`), and draws a process a rank, a track a domain; collectives that
overlap get tracks of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from taskd import config
from taskd.core.worker import clock_alignment as alignment
from taskd.core.worker.clock_alignment import Offset
from taskd.errors import SettingsError
from taskd.worker.profiling.record_files import base_dir
from taskd.worker.profiling.records import COMMUNICATION, DEVICE, Span, spans
from taskd.worker.settings import ProfilingSettings

TOGETHER = {"allreduce", "allgather", "allgather_base", "alltoall", "alltoall_base", "barrier"}
"""Nobody ends these before everybody has begun them."""
ABSOLUTE_S = 1e9
"""From here on, a time is one of the Unix clock, not one since the first record."""
NS = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("--from", dest="begin", type=float, help="seconds since the first record")
    parser.add_argument("--to", dest="end", type=float, help="the same; or Unix time, for both")
    parser.add_argument("--dir", action="append", type=Path, help="may be repeated, one a node")
    parser.add_argument("-o", "--output", type=Path, help="default: JOB.trace.json; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    settings = config.load(ProfilingSettings, prefix="TASKD_PROFILING")
    bases = arguments.dir or [base_dir(settings.dir)]
    ranks = read(bases, arguments.job)
    if not ranks:
        where = ", ".join(map(str, bases))
        raise SettingsError([f"there are no records of {arguments.job} in {where}"])
    merged, found = merge(ranks, arguments.begin, arguments.end)
    text = json.dumps(merged)
    if str(arguments.output) == "-":
        sys.stdout.write(text + "\n")
        return 0
    target = arguments.output or Path(f"{arguments.job.replace('/', '_')}.trace.json")
    try:
        target.write_text(text)
    except OSError as error:
        raise SettingsError([f"{target} cannot be written: {error.strerror}"]) from error
    sys.stdout.write(f"{target}: {len(merged['traceEvents'])} events, {_tell(found)}\n")
    return 0


def read(bases: Iterable[Path], job: str) -> dict[int, list[Span]]:
    """Of every rank that has left records, in the order of their files."""
    ranks: dict[int, list[Span]] = {}
    for base in bases:
        if not (base / job).is_dir():
            continue
        for folder in sorted(path for path in (base / job).iterdir() if path.name.isdecimal()):
            ranks.setdefault(int(folder.name), []).extend(spans(_lines(folder)))
    return {rank: found for rank, found in sorted(ranks.items()) if found}


def merge(
    ranks: dict[int, list[Span]], begin: float | None = None, end: float | None = None
) -> tuple[dict[str, Any], dict[int, Offset]]:
    found = alignment.offsets({rank: _shared(told) for rank, told in ranks.items()})
    aligned = {
        rank: [_shift(span, found[rank].ns) for span in told] for rank, told in ranks.items()
    }
    first = min(span.start_ns for told in aligned.values() for span in told)
    low, high = _moment(begin, first, 0), _moment(end, first, 1 << 63)
    events: list[dict[str, Any]] = []
    for rank, told in aligned.items():
        within = [span for span in told if span.end_ns >= low and span.start_ns <= high]
        events += _events(rank, within, first)
    return {"traceEvents": events, "displayTimeUnit": "ms"}, found


def _lines(folder: Path) -> Iterator[str]:
    names = [name for name in os.listdir(folder) if name.isdecimal()]
    for name in sorted(names, key=int):
        with (folder / name).open(errors="replace") as file:
            yield from file


def _shared(told: Sequence[Span]) -> dict[Hashable, tuple[int, int]]:
    """Collectives by name. A name that comes twice (a group formed anew) says nothing."""
    together = [
        span
        for span in told
        if span.domain == COMMUNICATION and _name(span).get("opName") in TOGETHER
    ]
    times = Counter((span.name, span.source) for span in together)
    return {
        (span.name, span.source): (span.start_ns, span.end_ns)
        for span in together
        if times[span.name, span.source] == 1
    }


def _name(span: Span) -> dict[str, Any]:
    try:
        told = json.loads(span.name)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _shift(span: Span, ns: int) -> Span:
    return span._replace(start_ns=span.start_ns - ns, end_ns=span.end_ns - ns) if ns else span


def _moment(told: float | None, first: int, default: int) -> int:
    if told is None:
        return default
    return int(told * NS) if told >= ABSOLUTE_S else first + int(told * NS)


def _events(rank: int, told: list[Span], first: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    tracks = _Tracks()
    for span in sorted(told, key=lambda span: (span.start_ns, -span.end_ns)):
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


class _Tracks:
    """Where a span is drawn: nothing may overlap on a track unless one lies within the other."""

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


def _tell(found: dict[int, Offset]) -> str:
    moved = {rank: offset for rank, offset in found.items() if offset.ns}
    lost = [rank for rank, offset in found.items() if offset.within_ns < 0]
    text = f"{len(found)} ranks"
    if moved:
        shifts = ", ".join(f"rank {r} by {o.ns / 1e6:.3f} ms" for r, o in moved.items())
        text += f", clocks set back: {shifts}"
    if lost:
        text += f"; nothing in common with rank {min(found)}: {', '.join(map(str, lost))}"
    return text
