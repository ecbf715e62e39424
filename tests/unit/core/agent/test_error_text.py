from __future__ import annotations

import pytest

from taskd.core.agent.error_text import error_lines, fault_line, headline, key_line, shortened

NOISE = "\n".join(f"nanobind: leaked instance 0x{n:x} of type 'torch.Tensor'" for n in range(40))
TRACE = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    fail()
  File "train.py", line 3, in fail
    raise RuntimeError("boom")
RuntimeError: boom"""


@pytest.mark.parametrize("prefix", ["", "[rank2]: ", "rank2: "])
def test_traceback_is_shown_and_not_the_warnings_after_it(prefix: str) -> None:
    trace = "\n".join(f"{prefix}{line}" for line in TRACE.splitlines())
    text = f"step 1\nstep 2\n{trace}\n{NOISE}\n"
    assert error_lines(text, 12) == trace.splitlines()
    assert key_line(text).removeprefix(prefix) == "RuntimeError: boom"


def test_last_traceback_of_a_chain_counts() -> None:
    text = f"{TRACE}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text += TRACE.replace("boom", "second")
    assert key_line(text) == "RuntimeError: second"


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    assert error_lines("a\nb\nc", 2) == ["b", "c"]
    assert key_line("signal 9") == "signal 9"
    assert key_line("") == ""


def test_long_traceback_is_cut_at_its_beginning() -> None:
    frames = "\n".join(f'  File "a.py", line {n}\n    call()' for n in range(50))
    text = f"Traceback (most recent call last):\n{frames}\nValueError: deep\n{NOISE}"
    lines = error_lines(text, 5)
    assert (len(lines), lines[-1]) == (5, "ValueError: deep")


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
        ("signal 9: a progress bar:  45%|###", "signal 9", "signal 9"),
        ("signal 9, SIGKILL: a progress bar", "signal 9, SIGKILL", "signal 9, SIGKILL"),
        ("signal 6, SIGABRT: what\nterminated", "terminated", "signal 6, SIGABRT: terminated"),
        ("signal 6: terminate called", "signal 6: terminate called", "signal 6: terminate called"),
        (CRASHED, "ValueError: loss is NaN", "exit code 1: ValueError: loss is NaN"),
        (HUNG, HUNG.splitlines()[0], HUNG.splitlines()[0]),
        ("exit code 3: one\ntwo", "two", "exit code 3: two"),
        ("", "", ""),
    ],
)
def test_headline_is_what_a_person_must_read(evidence: str, read_first: str, sentence: str) -> None:
    assert headline(evidence) == read_first
    assert fault_line(evidence) == sentence


def test_shortened_text_keeps_its_first_line_and_its_end() -> None:
    text = "what is wrong\n" + "x" * 5_000 + "the end"
    short = shortened(text, 100)
    assert len(short) <= 100
    assert short.startswith("what is wrong\n")
    assert short.endswith("the end")
    assert shortened("short", 100) == "short"
