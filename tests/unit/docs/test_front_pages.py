"""README, CONTRIBUTING and the examples agree with what is in the repository."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

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
