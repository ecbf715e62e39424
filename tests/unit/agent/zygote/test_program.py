"""How a forked worker ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = """
import atexit, gc, runpy
atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "free"))
from taskd.agent.zygote.program import Program, run
{types}
gc.freeze()
run(Program("script", {script!r}, ()))
"""


@pytest.mark.parametrize(
    ("types", "left"),
    [("class nb_meta(type): ...", "free"), ("class other(type): ...", "frozen")],
)
def test_frozen_objects_are_released_only_where_nanobind_counts_them(
    types: str, left: str, tmp_path: object
) -> None:
    script = f"{tmp_path}/train.py"
    with open(script, "w") as file:
        file.write("pass")
    code = ENDS.format(types=types, script=script)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{left}\n"
