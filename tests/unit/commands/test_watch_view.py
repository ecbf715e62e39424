from __future__ import annotations

import io
import re
import sys

import pytest

from taskd.commands.status import is_screen
from taskd.commands.watch_view import Terminal, hint, screen
from taskd.dashboard import incidents, views
from tests.unit.dashboard.history import History, status

NOW = 1_700_000_060_000


def shown(terminal: Terminal, ranks: int = 4) -> list[str]:
    history = History()
    history.recovery()
    history.report(1)
    known = status(ranks)
    known.total_steps = 100
    known.ranks[0].note = "exited: " + "x" * 500 + "\x1b[31mred\x07"
    return screen(known, incidents.read(history.lines), NOW, terminal).splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize("ranks", [4, 64, 10_000])
def test_screen_fits_the_terminal(width: int, height: int, ranks: int) -> None:
    lines = shown(Terminal(width, height), ranks)
    assert max(map(len, lines)) < width
    assert len(lines) < max(height, 16)


def test_progress_has_the_time_left_and_the_goodput() -> None:
    lines = shown(Terminal(120, 40))
    assert lines[1] == (
        "[##########..............] 41 of 100  3.50 steps/s  17 s left  goodput 97.0 %"
    )


def test_last_incident_is_drawn_as_lanes() -> None:
    text = "\n".join(shown(Terminal(80, 40)))
    assert "last incident, 1 min ago: rank 2 exited: signal 9" in text or "rank 2 exited" in text
    assert re.search(r"  stopped  =+ +40 ms\n  step      +=+ +60 ms", text)


def test_colours_only_where_the_terminal_has_them() -> None:
    assert "\x1b" not in "\n".join(shown(Terminal(80, 24)))
    assert "\x1b[32m" in "\n".join(shown(Terminal(80, 24, colour=True)))


def test_control_characters_of_a_job_do_not_reach_the_terminal() -> None:
    text = "\n".join(shown(Terminal(900, 24)))
    assert "\x07" not in text
    assert "\x1b" not in text


def test_hint_says_what_to_do_next() -> None:
    known = status()
    assert "taskd dashboard job" in hint(known, [], views.health_of(known, views.LIVE)[0])
    known.stragglers.add(rank=3, cause="compute")
    assert "taskd profile job on" in hint(known, [], "slow")
    history = History()
    for number in range(1, 4):
        history.recovery(number)
        history.report(number)
    assert "node 1 has caused 3 incidents" in hint(known, incidents.read(history.lines), "training")


def test_command_of_a_hint_is_never_cut() -> None:
    history, known = History(), status()
    history.recovery()
    known.line.job = "a-job-with-a-long-name-\x07" + "x" * 40
    lines = screen(known, incidents.read(history.lines), NOW, Terminal(60, 40)).splitlines()
    assert lines[-2] == "hint: all incidents:"
    assert lines[-1] == f"  taskd replay a-job-with-a-long-name- {'x' * 40} --html report.html"


def test_end_of_the_job_is_not_shown_as_a_recovery() -> None:
    known = status()
    known.line.state, known.line.because = "Ended", "all ranks have finished"
    text = screen(known, [], NOW, Terminal(80, 24))
    assert "The job has ended: all ranks have finished" in text
    assert "hint: the last lines of taskd run say how to get a report" in text


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "expected"), [("xterm", True), ("dumb", False), ("", False)])
def test_only_a_terminal_that_can_be_cleared_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool
) -> None:
    monkeypatch.setenv("TERM", kind)
    assert not is_screen()
    monkeypatch.setattr(sys, "stdout", TerminalText())
    assert is_screen() == expected
