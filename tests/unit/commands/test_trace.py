from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from taskd import cli
from taskd.commands import trace
from taskd.dashboard.incidents import read as read_incidents
from taskd.worker.profiling.record_files import RecordFiles
from taskd.worker.profiling.records import (
    COMMUNICATION,
    DEFAULT,
    DEVICE,
    Span,
    collective,
    lines,
)
from tests.unit.dashboard.history import History

MS = 1_000_000
BEGIN = 1_700_000_000_000 * MS


def save(base: Path, rank: int, spans: list[Span]) -> None:
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


def test_ranks_of_two_nodes_are_on_one_clock(tmp_path: Path) -> None:
    nodes = tmp_path / "a", tmp_path / "b"
    save(nodes[0], 0, records(0, 0))
    save(nodes[1], 1, records(1, 700 * MS))
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


def test_hostile_files_in_a_shared_folder_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other users of the cluster may write there: a pipe must not block, a link not be read."""
    save(tmp_path, 0, records(0, 0))
    folder = tmp_path / "the-job" / "0"
    good = next(folder.iterdir()).read_text().splitlines()[0]
    secret = tmp_path / "secret"
    secret.write_text(good.replace("step 0", "of another user"))
    os.mkfifo(folder / "1")
    (folder / "2").symlink_to(secret)
    (folder / "3").mkdir()
    wrong = [
        good.replace(str(BEGIN), value) for value in ("1e400", "-5", "9" * 30, "NaN", '"x"', "[]")
    ]
    wrong.append(good.replace('"step 0"', json.dumps(json.dumps({"opName": {}}))))
    wrong.append("[" * 100_000 + "x" * 2_000_000)
    (folder / "4").write_text("\n".join(wrong) + "\n")
    target = tmp_path / "out.json"
    assert cli.main(["trace", "the-job", "--dir", str(tmp_path), "-o", str(target)]) == 0
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"]}
    assert "step 0" in names
    assert "of another user" not in names
    assert capsys.readouterr().err.count("left out") == 3


def test_from_and_to_select_a_time_range(tmp_path: Path) -> None:
    save(tmp_path, 0, records(0, 0))
    found = trace.read([tmp_path], "the-job")
    merged, _ = trace.merge(found, begin=0.05, end=0.09)
    names = {event["name"] for event in merged["traceEvents"] if event["ph"] == "X"}
    assert {"step 0", "step 1"} <= names
    assert "step 3" not in names
    unix, _ = trace.merge(found, begin=BEGIN / 1e9 + 0.16, end=BEGIN / 1e9 + 0.19)
    assert "step 0" not in {event["name"] for event in unix["traceEvents"]}


def test_overlapping_spans_get_separate_tracks(tmp_path: Path) -> None:
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


def test_job_without_records_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "unknown", "--dir", str(tmp_path)]) == 1
    assert "no records of job unknown" in capsys.readouterr().err


def test_incidents_are_drawn_beside_the_ranks() -> None:
    history = History()
    history.at = BEGIN // MS
    history.recovery()
    history.report(1)
    ranks = {0: records(0, 0), 1: records(1, 0)}
    merged, _ = trace.merge(ranks, incidents=read_incidents(history.lines))
    drawn = [event for event in merged["traceEvents"] if event.get("cat") == "incident"]
    assert [event["name"] for event in drawn] == ["rank 2 exited: signal 9", "stopped", "step"]
    assert {event["pid"] for event in drawn} == {2}
    assert [event["dur"] for event in drawn] == [100_000.0, 40_000.0, 60_000.0]
    assert drawn[1]["ts"] == drawn[0]["ts"] == pytest.approx(10_000.0)
