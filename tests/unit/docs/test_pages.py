"""What the README and the documentation mention exists: links, files, settings, numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
ROWS = {
    "**TaskD**": "the same, in seconds",
    "torchft, with a fifth rank in reserve": "torchft with a spare rank, how much slower",
    "NVIDIA in-process restart, with a fifth rank in reserve": (
        "NVIDIA, in-process restart with a spare rank, how much slower"
    ),
    "torchft": "torchft, how much slower",
    "torchrun": "torchrun, how much slower",
    "DLRover": "DLRover, how much slower",
    "NVIDIA in-job restart": "NVIDIA, in-job restart, how much slower",
    "`taskd run`, unmodified script": (
        "`taskd run` with an unmodified script; torchrun, how much slower"
    ),
}
"""The README's rows, and the benchmark's."""


@pytest.mark.parametrize("row", ROWS)
def test_readme_times_are_those_of_the_benchmark(row: str) -> None:
    (shown,) = re.findall(rf"^\| {re.escape(row)} \| \**([\d.]+) s", README, re.MULTILINE)
    (cells,) = re.findall(rf"^\| {re.escape(ROWS[row])} \| (.*) \|$", BENCHMARKS, re.MULTILINE)
    ours, against, *_ = cells.split(" | ")
    measured = re.search(r"([\d.]+) ms", ours if "taskd" in row.lower() else against)
    assert measured is not None, cells
    assert shown == f"{float(measured[1]) / 1000:.2f}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_front_pages_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        if not target.startswith("https:"):
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_readme_lists_every_example() -> None:
    shared = {"demo.py", "machines.py", "watched.py"}
    examples = {path.name for path in (ROOT / "examples").glob("*.py")} - shared
    assert set(re.findall(r"`(\w+\.py)`", README)) & examples == examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_files_exist(page: Path) -> None:
    """`repair_plan.py`, or without `.py`, below src/taskd; others below the root."""
    packages = {path.name for path in (ROOT / "src" / "taskd").iterdir() if path.is_dir()}
    for name in re.findall(r"`([\w.]+(?:/[\w.]+)+)`", page.read_text()):
        if name.endswith((".py", ".txt", ".json", ".proto", ".sh")):
            found = any((ROOT / top / name).exists() for top in ("", "src/taskd", "docs"))
        elif name.split("/")[0] in packages:
            found = any((ROOT / "src/taskd" / path).exists() for path in (name, f"{name}.py"))
        else:
            continue
        assert found, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_settings_exist(page: Path) -> None:
    known = (ROOT / "docs" / "reference" / "settings.md").read_text()
    for name in re.findall(r"\bTASKD_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()):
        assert re.search(rf"\b{name}\b", known), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_wrap_at_100_columns(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.lstrip().startswith("|")]
