from __future__ import annotations

import pytest

from taskd.core.agent.error_text import error_lines, key_line

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
