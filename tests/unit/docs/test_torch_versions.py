"""One list of torch versions: whatever repeats it must agree with `runtime/torch_versions.py`."""

from __future__ import annotations

import re
import tomllib

from taskd.runtime.torch_versions import (
    NEWEST,
    OLDEST,
    TESTED,
    Support,
    judge,
    minor,
    requirement,
    supported_torch,
)
from tests import ROOT

SUPPORT = ROOT / "docs/reference/support.md"


def test_list_has_one_release_of_each_minor_version_in_order() -> None:
    (major, oldest), (_, newest) = OLDEST, NEWEST
    assert [minor(one) for one in TESTED] == [(major, at) for at in range(oldest, newest + 1)]


def test_versions_are_judged_by_the_list() -> None:
    assert {judge(one) for one in TESTED} == {Support.TESTED}
    assert judge("2.13.0a0+git77") is Support.TESTED
    assert judge("1.13.1") is Support.TOO_OLD
    assert judge("2.99.0.dev20270101") is judge("3.0.0") is Support.NEWER
    assert judge("nightly") is Support.UNREADABLE


def test_extra_has_the_tested_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement() in project["optional-dependencies"]["torch"]


def test_pinned_version_is_tested() -> None:
    pinned = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) == 1
    assert pinned[0] in TESTED


def test_pages_name_the_supported_versions() -> None:
    assert supported_torch() in (ROOT / "README.md").read_text()
    row = next(line for line in SUPPORT.read_text().splitlines() if line.startswith("| torch |"))
    assert re.findall(r"\d+\.\d+\.\d+", row) == list(TESTED)


def test_make_tests_the_newest_version_by_default() -> None:
    assert f"TORCH ?= {TESTED[-1]}\n" in (ROOT / "Makefile").read_text()
