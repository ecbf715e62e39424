"""docs/reference/settings.md is what tools/settings.py writes, and has every setting."""

from __future__ import annotations

import runpy

import pytest

from tests import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "settings.py"))
PAGE = TOOL["render"]()


def row(name: str) -> str:
    (found,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    return str(found)


def test_page_is_up_to_date() -> None:
    assert TOOL["PAGE"].read_text() == PAGE, "run `make settings`"


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("TASKD_LOG_PATH", "str", "'./taskd_log/'"),
        ("TASKD_RECOVER_RETRY_S", "float", "5.0"),
    ],
)
def test_variables_have_type_default_and_description(name: str, kind: str, default: str) -> None:
    _, _, shown_kind, shown_default, description, _ = map(str.strip, row(name).split("|"))
    assert (shown_kind, shown_default) == (f"`{kind}`", f"`{default}`")
    assert description


def test_classes_that_are_not_loaded_have_no_variables() -> None:
    variables, _, by_program = PAGE.partition("## Set by the program")
    assert "`taskd.runtime.log`" in variables
    assert "`taskd.agent.run.plan`" in by_program


def test_variables_that_are_read_by_name_are_found() -> None:
    for name in ("MINDX_TASK_ID", "POD_IP", "GROUP_BASE_DIR", "MS_NODE_RANK"):
        assert TOOL["VARIABLES"][name] in row(name)
