"""The lines of a profiling file: Ascend's JSON records, one for each end of a span.

    {"Kind":1,"Flag":2,"SourceKind":0,"Timestamp":ns,"Id":7,"MsptiObjectId":{…},"Name":…,"Domain":…}

A span is a pair of marks with the same Id, Flag 2 at its start and 4 at its end (16 and 32 on the
device). Times are Unix time in nanoseconds. `recorder.py` writes the lines,
`commands/trace.py` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from taskd.wire.json_reading import loads

HOST, DEVICE = 0, 1
DEFAULT, COMMUNICATION = "default", "communication"
_FLAGS = {HOST: (2, 4), DEVICE: (16, 32)}
_STARTS = {2, 16}


class Span(NamedTuple):
    """A measured interval. A tuple, because the training thread creates it: it must be cheap."""

    domain: str
    name: str
    start_ns: int
    end_ns: int
    id: int
    thread: int
    source: int = HOST
    device: int = 0
    stream: int = 0


def collective(op: str, group: str, sequence: int, count: int, dtype: str) -> str:
    """The name of a communication record, with the keys that Ascend's own records have."""
    return (
        f'{{"opName":"{op}","groupName":{json.dumps(group)},"count":"{count}",'
        f'"dataType":"{dtype}","seq":"{sequence}"}}'
    )


def lines(spans: Iterable[Span], pid: int) -> Iterator[str]:
    """Formatted by hand: json.dumps would take ten times as long."""
    for span in spans:
        begin, end = _FLAGS[span.source]
        tail = (
            f',"Id":{span.id},"MsptiObjectId":{{"Pt":{{"ProcessId":{pid},"ThreadId":{span.thread}}},'
            f'"Ds":{{"DeviceId":{span.device},"StreamId":{span.stream}}}}},'
            f'"Name":{json.dumps(span.name)},"Domain":"{span.domain}"}}\n'
        )
        head = f'{{"Kind":1,"SourceKind":{span.source},"Flag":'
        yield f'{head}{begin},"Timestamp":{span.start_ns}{tail}'
        yield f'{head}{end},"Timestamp":{span.end_ns}{tail}'


@dataclass(frozen=True, slots=True)
class Mark:
    start: bool
    ns: int
    span: Span
    """Both ends have the time of this mark."""


def mark(line: str) -> Mark | None:
    """None: the line is incomplete, or its kind is not a mark."""
    try:
        fields: Any = loads(line)
        if fields["Kind"] != 1:
            return None
        ids, at = fields["MsptiObjectId"], int(fields["Timestamp"])
        if not 0 <= at < 2**63:
            return None
        span = Span(
            str(fields["Domain"]),
            str(fields["Name"]),
            at,
            at,
            int(fields["Id"]),
            int(ids["Pt"]["ThreadId"]),
            int(fields["SourceKind"]),
            int(ids["Ds"]["DeviceId"]),
            int(ids["Ds"]["StreamId"]),
        )
        return Mark(fields["Flag"] in _STARTS, at, span)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def spans(read: Iterable[str]) -> Iterator[Span]:
    """Join the marks of one rank to spans. A mark without its other end is left out."""
    open_: dict[tuple[int, int], Span] = {}
    for line in read:
        found = mark(line)
        if found is None:
            continue
        key = found.span.id, found.span.source
        if found.start:
            open_[key] = found.span
        elif (begun := open_.pop(key, None)) is not None:
            yield begun._replace(end_ns=found.ns)
