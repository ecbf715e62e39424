"""docs/recovery.md shows the machine's own map, and its appendix names tests that exist."""

from __future__ import annotations

import re

from tools.diagram import PAGE, drawings, redrawn

from taskd.core.clusterd.machine import LEGAL
from tests import ROOT

WEAKNESSES = ROOT / "docs" / "appendix" / "clusterd-weaknesses.md"


def test_diagram_matches_the_legal_edges() -> None:
    page = PAGE.read_text()
    assert redrawn(page) == page, "run `python -m tools.diagram`"
    for path, drawing in drawings().items():
        assert path.read_text() == drawing, "run `python -m tools.diagram`"


def test_every_state_has_a_row_in_a_table() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert {state.__name__ for state in LEGAL} <= explained


def test_every_weakness_has_a_row_and_every_row_a_test() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| .* \| (.+) \|$", WEAKNESSES.read_text(), re.MULTILINE)
    numbers = [int(number) for listed, _ in rows for number in listed.split(",")]
    assert sorted(numbers) == [*range(1, 47)]
    for listed, shown in rows:
        assert re.search(r"`[\w/.:]*(test_|Test)\w+`", shown), listed


def test_every_test_that_the_pages_name_exists() -> None:
    """`tests/unit/test_x.py::name`, or a scenario `name.txt`."""
    page = PAGE.read_text() + WEAKNESSES.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        assert (ROOT / path).exists(), path
        found = re.search(rf"(def|class) {name}\b", (ROOT / path).read_text())
        assert not name or found, f"{path}::{name}"
    weaknesses = (ROOT / "tests/unit/core/clusterd/test_upstream_weaknesses.py").read_text()
    for name in re.findall(r"`((?:test_|Test)\w+)`", page):
        assert re.search(rf"(def|class) {name}\b", weaknesses), name
    for scenario in re.findall(r"`(\w+)\.txt`", page):
        assert (ROOT / "tests" / "scenarios" / f"{scenario}.txt").exists(), scenario
