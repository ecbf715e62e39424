"""The lines of a profiling file, and the times that a rank's steps are made of."""

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
from taskd.worker.profiling.pace import Stopwatch
from taskd.worker.profiling.records import (
    COMMUNICATION,
    DEFAULT,
    DEVICE,
    Span,
    collective,
    lines,
    spans,
)

STEP = Span(DEFAULT, "step 3", 100, 250, 7, 11)


def test_a_record_has_ascends_keys() -> None:
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


def test_marks_of_a_device_have_flags_of_their_own() -> None:
    on_device = STEP._replace(source=DEVICE, device=1, stream=9)
    start, end = map(json.loads, lines([on_device], pid=10))
    assert (start["Flag"], end["Flag"], start["SourceKind"]) == (16, 32, 1)
    assert start["MsptiObjectId"]["Ds"] == {"DeviceId": 1, "StreamId": 9}


def test_what_is_written_is_read_again() -> None:
    name = collective("allreduce", 'odd"group\\', 5, 4096, "float32")
    assert json.loads(name)["groupName"] == 'odd"group\\'
    told = [STEP, Span(COMMUNICATION, name, 120, 180, 8, 11, DEVICE, 0, 3)]
    assert sorted(spans(lines(told, pid=1))) == sorted(told)


def test_torn_and_foreign_lines_are_left_out() -> None:
    start, end = lines([STEP], pid=1)
    foreign = '{"Kind":3,"Start":1,"End":2,"Pt":{},"CorrelationId":1,"Name":"aclrtSync"}\n'
    assert list(spans(["nonsense", start[:40], foreign, end])) == []
    assert list(spans([start, "[]", end])) == [STEP]


# The switch


def test_only_a_plain_on_counts() -> None:
    assert parts_of({}) == NOTHING
    assert parts_of({"Step": "On", "FP": "off", "DataLoader": True}) == NOTHING
    assert parts_of({"CommunicationOperator": "on", "Step": "on"}) == Part.COMMUNICATION | Part.STEP


def test_an_order_of_ascends_manager_means_whole_domains() -> None:
    assert parts_ordered(True, True, ()) == EVERYTHING
    assert parts_ordered(True, False, ()) == EVERYTHING & ~Part.COMMUNICATION
    assert parts_ordered(False, True, ()) == Part.COMMUNICATION
    assert parts_ordered(True, True, names_of(Part.STEP)) == Part.STEP


# The pace


def test_collectives_beside_the_backward_pass_cost_only_their_tail() -> None:
    watch = Stopwatch()
    watch.stepped(1_000)
    for launch, end in ((1_300, 1_500), (1_600, 1_900)):
        watch.turn.collectives += 1
        watch.turn.launch(launch)
        watch.turn.end(end)
    watch.stepped(2_000)
    watch.stepped(3_000)
    sums = watch.sums
    assert (sums.steps, sums.collectives) == (1, 2)
    assert round(sums.wait_s * 1e9) == 300
    assert round(sums.total_s * 1e9) == 1_000


def test_a_wait_that_is_seen_is_not_counted_twice() -> None:
    watch = Stopwatch()
    watch.stepped(1_000)
    watch.turn.launch(1_300)
    watch.turn.end(1_500)
    watch.turn.wait(1_310, 1_510)
    watch.stepped(2_000)
    watch.stepped(3_000)
    assert round(watch.sums.wait_s * 1e9) == 210


def test_waits_that_overlap_count_once() -> None:
    watch = Stopwatch()
    watch.stepped(1_000)
    for start, end in ((1_100, 1_300), (1_110, 1_320), (1_105, 1_310)):
        watch.turn.wait(start, end)
    watch.stepped(2_000)
    watch.stepped(3_000)
    assert round(watch.sums.wait_s * 1e9) == 220


def test_the_tail_counts_also_when_something_else_follows_it() -> None:
    """Found in a real run: DDP waits for its gradients, then for its buffers."""
    watch = Stopwatch()
    watch.stepped(1_000)
    watch.turn.launch(1_400)
    watch.turn.end(1_800)
    watch.turn.wait(1_810, 1_850)
    watch.stepped(2_000)
    watch.stepped(3_000)
    assert round(watch.sums.wait_s * 1e9) == 440


def test_an_end_that_is_told_after_its_step_still_counts() -> None:
    watch = Stopwatch()
    watch.stepped(1_000)
    turn = watch.turn
    turn.launch(1_400)
    watch.stepped(2_000)
    turn.end(1_900)
    watch.stepped(3_000)
    assert round(watch.sums.wait_s * 1e9) == 500


def test_the_step_in_which_it_was_switched_on_does_not_count() -> None:
    watch = Stopwatch()
    watch.turn.launch(5)
    watch.turn.end(900)
    for now in (1_000, 2_000, 3_000):
        watch.stepped(now)
    assert watch.sums.steps == 1
    assert watch.sums.wait_s == 0
