"""The drawing in docs/recovery.md is the machine's own map."""

from __future__ import annotations

import re
from pathlib import Path

from tools.diagram import PAGE, redrawn

from taskd.core.recovery.edges import LEGAL

ROOT = Path(__file__).parent.parent.parent


def test_the_drawing_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert redrawn(page) == page, "run `python -m tools.diagram`"


def test_every_state_is_explained_in_a_table() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert {state.__name__ for state in LEGAL} <= explained


def test_every_test_that_the_page_names_exists() -> None:
    """`tests/unit/test_x.py::name`, or a scenario `name.txt`."""
    page = PAGE.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        assert (ROOT / path).exists(), path
        assert name in (ROOT / path).read_text(), f"{path}::{name}"
    weaknesses = (ROOT / "tests/unit/test_recovery_weaknesses.py").read_text()
    for name in re.findall(r"`((?:test_|Test)\w+)`", page):
        assert re.search(rf"(def|class) {name}\b", weaknesses), name
    for story in re.findall(r"`(\w+)\.txt`", page):
        assert (ROOT / "tests" / "scenarios" / f"{story}.txt").exists(), story
