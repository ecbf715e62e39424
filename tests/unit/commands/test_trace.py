"""One clock for all ranks, and their records in one file."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd import cli
from taskd.commands import trace
from taskd.core.worker.clock_alignment import between, offsets
from taskd.worker.profiling.record_files import RecordFiles
from taskd.worker.profiling.records import (
    COMMUNICATION,
    DEFAULT,
    DEVICE,
    Span,
    collective,
    lines,
)

MS = 1_000_000
BEGIN = 1_700_000_000_000 * MS

Told = dict[int, dict[Hashable, tuple[int, int]]]


def job(random: Random, clocks: list[int], count: int = 30) -> Told:
    """What each rank writes down of the same collectives, by a clock that is ahead by so much."""
    told: Told = {rank: {} for rank in range(len(clocks))}
    now = BEGIN
    for number in range(count):
        starts = [now + random.randrange(20 * MS) for _ in clocks]
        for rank, ahead in enumerate(clocks):
            end = max(starts) + random.randrange(1, 5 * MS)
            told[rank][number] = starts[rank] + ahead, end + ahead
        now = max(starts) + 10 * MS
    return told


@given(seed=st.integers(0, 10_000), ahead=st.integers(-3_600_000 * MS, 3_600_000 * MS))
def test_the_true_offset_is_within_what_is_claimed(seed: int, ahead: int) -> None:
    told = job(Random(seed), [0, ahead])
    found = between(told[0], told[1])
    assert found is not None
    assert abs(found.ns - ahead) <= found.within_ns
    if found.ns:
        assert found.within_ns < 10 * MS


def test_ranks_of_one_machine_are_left_alone() -> None:
    found = offsets(job(Random(1), [0, 0, 0, 0]))
    assert [offset.ns for offset in found.values()] == [0, 0, 0, 0]


def test_ranks_that_never_met_are_joined_through_others() -> None:
    told = job(Random(2), [0, 5_000 * MS, 9_000 * MS])
    chain = {
        0: {key: span for key, span in told[0].items() if int(str(key)) < 15},
        1: told[1],
        2: {key: span for key, span in told[2].items() if int(str(key)) >= 15},
    }
    found = offsets(chain)
    assert abs(found[2].ns - 9_000 * MS) <= found[2].within_ns < 20 * MS


def test_a_stranger_stays_where_he_is() -> None:
    found = offsets({0: {"a": (1, 2)}, 1: {"b": (1, 2)}, 2: {}})
    assert {rank: offset.within_ns for rank, offset in found.items()} == {0: 0, 1: -1, 2: -1}


def test_a_clock_that_was_set_in_between_is_no_reason_to_fail() -> None:
    mine: dict[Hashable, tuple[int, int]] = {n: (n * 100, n * 100 + 10) for n in range(10)}
    yours = {
        k: (s + (500 if s > 500 else 0), e + (500 if s > 500 else 0)) for k, (s, e) in mine.items()
    }
    assert between(mine, yours) is not None


# The file


def keep(base: Path, rank: int, spans: list[Span]) -> None:
    RecordFiles(base, "the/job".replace("/", "-"), rank, 100, lambda: BEGIN / 1e9).append(
        list(lines(spans, pid=rank))
    )


def records(rank: int, ahead: int) -> list[Span]:
    spans = []
    for step in range(4):
        begin = BEGIN + step * 50 * MS + ahead
        name = collective("allreduce", "world", step, 8, "float32")
        spans += [
            Span(DEFAULT, f"step {step}", begin, begin + 50 * MS, 10 * step + 1, 1),
            Span(DEFAULT, "forward", begin + MS, begin + 9 * MS, 10 * step + 2, 1),
            Span(COMMUNICATION, name, begin + (20 + rank) * MS, begin + 30 * MS, 10 * step + 3, 1),
            Span(
                COMMUNICATION,
                name.replace("world", f"w{rank}"),
                begin + 25 * MS,
                begin + 40 * MS,
                10 * step + 4,
                1,
                DEVICE,
                0,
                7,
            ),
        ]
    return spans


def test_ranks_of_two_nodes_in_one_trace(tmp_path: Path) -> None:
    nodes = tmp_path / "a", tmp_path / "b"
    keep(nodes[0], 0, records(0, 0))
    keep(nodes[1], 1, records(1, 700 * MS))
    target = tmp_path / "out.json"
    arguments = ["trace", "the-job", "--dir", str(nodes[0]), "--dir", str(nodes[1])]
    assert cli.main([*arguments, "-o", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == 32
    steps = {
        rank: [e["ts"] for e in drawn if e["pid"] == rank and e["name"].startswith("step")]
        for rank in (0, 1)
    }
    for mine, yours in zip(steps[0], steps[1], strict=True):
        assert abs(mine - yours) < 10_000, "in microseconds: both are on one clock"
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"training", "communication", "device 0 communication"}


def test_from_and_to(tmp_path: Path) -> None:
    keep(tmp_path, 0, records(0, 0))
    found = trace.read([tmp_path], "the-job")
    merged, _ = trace.merge(found, begin=0.05, end=0.09)
    names = {event["name"] for event in merged["traceEvents"] if event["ph"] == "X"}
    assert {"step 0", "step 1"} <= names
    assert "step 3" not in names
    unix, _ = trace.merge(found, begin=BEGIN / 1e9 + 0.16, end=BEGIN / 1e9 + 0.19)
    assert "step 0" not in {event["name"] for event in unix["traceEvents"]}


def test_spans_that_overlap_get_tracks_of_their_own(tmp_path: Path) -> None:
    spans = [
        Span(
            COMMUNICATION,
            collective("allreduce", "w", n, 8, "f"),
            BEGIN + n * MS,
            BEGIN + (n + 5) * MS,
            n + 1,
            1,
        )
        for n in range(4)
    ]
    merged, _ = trace.merge({0: spans})
    tracks = [event["tid"] for event in merged["traceEvents"] if event["ph"] == "X"]
    assert sorted(tracks) == [1, 2, 3, 4]


def test_a_job_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "nobody", "--dir", str(tmp_path)]) == 1
    assert "no records of job nobody" in capsys.readouterr().err
