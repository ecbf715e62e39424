from __future__ import annotations

import pytest

from taskd.core.agent.error_text import headline, one_line, shortened

HUNG = """rank 1 has made no progress for 1.89 s: 3 ranks wait for it
Thread 0x01 (most recent call first):
  File "train.py", line 3 in wait
taskd: Python runs, 0.000000 s later
"""
CRASHED = """exit code 1: epoch 3
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 52, in <module>
[rank3]: ValueError: loss is NaN
a warning at exit
"""


@pytest.mark.parametrize(
    ("evidence", "read_first", "sentence"),
    [
        ("signal 9", "signal 9", "signal 9"),
        (CRASHED, "ValueError: loss is NaN", "exit code 1: ValueError: loss is NaN"),
        (HUNG, HUNG.splitlines()[0], HUNG.splitlines()[0]),
        ("exit code 3: one\ntwo", "two", "exit code 3: two"),
        ("", "", ""),
    ],
)
def test_headline_is_what_a_person_must_read(evidence: str, read_first: str, sentence: str) -> None:
    assert headline(evidence) == read_first
    assert one_line(evidence) == sentence


def test_shortened_text_keeps_its_first_line_and_its_end() -> None:
    text = "what is wrong\n" + "x" * 5_000 + "the end"
    short = shortened(text, 100)
    assert len(short) <= 100
    assert short.startswith("what is wrong\n")
    assert short.endswith("the end")
    assert shortened("short", 100) == "short"
