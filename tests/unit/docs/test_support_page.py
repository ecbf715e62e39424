"""The table of parallelisms in docs/reference/support.md is what the tests show."""

from __future__ import annotations

import runpy

from tests import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "support.py"))


def test_page_is_up_to_date() -> None:
    page = TOOL["PAGE"].read_text()
    assert TOOL["render"](page) == page, "run `make settings`"


def test_every_parallelism_has_a_test_that_loses_a_rank() -> None:
    table = TOOL["shown"]()
    assert "FSDP2 (`fully_shard`)" in table
    assert [name for name, faults in table.items() if "lost rank" not in faults] == []
