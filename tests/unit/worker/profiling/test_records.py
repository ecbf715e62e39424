"""The lines of a profiling file, and the totals of a rank's step times."""

from __future__ import annotations

import json

from taskd.model.profiling import (
    EVERYTHING,
    NOTHING,
    Part,
    names_of,
    parts_of,
    parts_ordered,
)
from taskd.worker.profiling.records import (
    COMMUNICATION,
    DEFAULT,
    DEVICE,
    Span,
    collective,
    lines,
    spans,
)
from taskd.worker.profiling.step_times import StepTimer

STEP = Span(DEFAULT, "step 3", 100, 250, 7, 11)


def test_record_has_ascends_keys() -> None:
    start, end = map(json.loads, lines([STEP], pid=10))
    assert start == {
        "Kind": 1,
        "Flag": 2,
        "SourceKind": 0,
        "Timestamp": 100,
        "Id": 7,
        "MsptiObjectId": {
            "Pt": {"ProcessId": 10, "ThreadId": 11},
            "Ds": {"DeviceId": 0, "StreamId": 0},
        },
        "Name": "step 3",
        "Domain": "default",
    }
    assert (end["Flag"], end["Timestamp"], end["Id"]) == (4, 250, 7)


def test_device_marks_have_their_own_flags() -> None:
    on_device = STEP._replace(source=DEVICE, device=1, stream=9)
    start, end = map(json.loads, lines([on_device], pid=10))
    assert (start["Flag"], end["Flag"], start["SourceKind"]) == (16, 32, 1)
    assert start["MsptiObjectId"]["Ds"] == {"DeviceId": 1, "StreamId": 9}


def test_written_records_are_read_back() -> None:
    name = collective("allreduce", 'odd"group\\', 5, 4096, "float32")
    assert json.loads(name)["groupName"] == 'odd"group\\'
    written = [STEP, Span(COMMUNICATION, name, 120, 180, 8, 11, DEVICE, 0, 3)]
    assert sorted(spans(lines(written, pid=1))) == sorted(written)


def test_incomplete_and_foreign_lines_are_left_out() -> None:
    start, end = lines([STEP], pid=1)
    foreign = '{"Kind":3,"Start":1,"End":2,"Pt":{},"CorrelationId":1,"Name":"aclrtSync"}\n'
    assert list(spans(["nonsense", start[:40], foreign, end])) == []
    assert list(spans([start, "[]", end])) == [STEP]


# The switch


def test_only_the_exact_value_on_counts() -> None:
    assert parts_of({}) == NOTHING
    assert parts_of({"Step": "On", "FP": "off", "DataLoader": True}) == NOTHING
    assert parts_of({"CommunicationOperator": "on", "Step": "on"}) == Part.COMMUNICATION | Part.STEP


def test_order_without_parts_means_whole_domains() -> None:
    assert parts_ordered(True, True, ()) == EVERYTHING
    assert parts_ordered(True, False, ()) == EVERYTHING & ~Part.COMMUNICATION
    assert parts_ordered(False, True, ()) == Part.COMMUNICATION
    assert parts_ordered(True, True, names_of(Part.STEP)) == Part.STEP


# Step times


def test_overlapped_collectives_cost_only_their_tail() -> None:
    timer = StepTimer()
    timer.step_ended(1_000)
    for launch, end in ((1_300, 1_500), (1_600, 1_900)):
        timer.current.collectives += 1
        timer.current.launch(launch)
        timer.current.end(end)
    timer.step_ended(2_000)
    timer.step_ended(3_000)
    totals = timer.totals
    assert (totals.steps, totals.collectives) == (1, 2)
    assert round(totals.wait_s * 1e9) == 300
    assert round(totals.total_s * 1e9) == 1_000


def test_wait_inside_the_tail_is_counted_once() -> None:
    timer = StepTimer()
    timer.step_ended(1_000)
    timer.current.launch(1_300)
    timer.current.end(1_500)
    timer.current.wait(1_310, 1_510)
    timer.step_ended(2_000)
    timer.step_ended(3_000)
    assert round(timer.totals.wait_s * 1e9) == 210


def test_overlapping_waits_count_once() -> None:
    timer = StepTimer()
    timer.step_ended(1_000)
    for start, end in ((1_100, 1_300), (1_110, 1_320), (1_105, 1_310)):
        timer.current.wait(start, end)
    timer.step_ended(2_000)
    timer.step_ended(3_000)
    assert round(timer.totals.wait_s * 1e9) == 220


def test_tail_counts_when_another_wait_follows_it() -> None:
    """Found in a real run: DDP waits for its gradients, then for its buffers."""
    timer = StepTimer()
    timer.step_ended(1_000)
    timer.current.launch(1_400)
    timer.current.end(1_800)
    timer.current.wait(1_810, 1_850)
    timer.step_ended(2_000)
    timer.step_ended(3_000)
    assert round(timer.totals.wait_s * 1e9) == 440


def test_collective_that_ends_after_its_step_still_counts() -> None:
    timer = StepTimer()
    timer.step_ended(1_000)
    step = timer.current
    step.launch(1_400)
    timer.step_ended(2_000)
    step.end(1_900)
    timer.step_ended(3_000)
    assert round(timer.totals.wait_s * 1e9) == 500


def test_incomplete_first_step_does_not_count() -> None:
    timer = StepTimer()
    timer.current.launch(5)
    timer.current.end(900)
    for now in (1_000, 2_000, 3_000):
        timer.step_ended(now)
    assert timer.totals.steps == 1
    assert timer.totals.wait_s == 0
