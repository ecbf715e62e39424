from __future__ import annotations

import runpy

import pytest

from tests import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "settings.py"))


def test_the_page_is_up_to_date() -> None:
    assert TOOL["PAGE"].read_text() == TOOL["render"](), "run `make settings`"


@pytest.mark.parametrize(
    "row",
    [
        "| `TASKD_LOG_PATH` | `str` | `'./taskd_log/'` | Directory of the log files; made on the "
        "first line, with mode 0750. |",
        "| `TASKD_RECOVER_RETRY_S` | `float` | `5.0` | Pause before Init or Register is tried "
        "again. |",
    ],
)
def test_variables_have_their_sentences(row: str) -> None:
    assert row in TOOL["render"]().splitlines()


def test_variables_that_are_read_by_name_are_found() -> None:
    page = TOOL["render"]()
    for name in ("MINDX_TASK_ID", "POD_IP", "GROUP_BASE_DIR", "MS_NODE_RANK"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert TOOL["VARIABLES"][name] in row
