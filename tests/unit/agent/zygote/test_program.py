"""What a forked worker runs, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskd.agent.zygote.program import Program, read_ahead

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


READ_AHEAD = """
import sys
from pathlib import Path
from taskd.agent.zygote.program import Program, read_ahead, run
program = Program("script", sys.argv[1], ())
code = read_ahead(program)
assert code is None or code.co_filename == sys.argv[1]
Path(sys.argv[1]).write_text(sys.argv[2])
run(program)
"""


@pytest.mark.parametrize(
    ("before", "now"),
    [("print(1)", "print(1)"), ("print(1)", "print(2)"), ("print(", "print(3)")],
)
def test_script_that_was_compiled_ahead_runs_as_it_is_now(
    before: str, now: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(before)
    command = [sys.executable, "-c", READ_AHEAD, str(script), now]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == now[-2] + "\n"


def test_script_that_is_gone_cannot_be_compiled_ahead(tmp_path: Path) -> None:
    assert read_ahead(Program("script", str(tmp_path / "train.py"))) is None
    assert read_ahead(Program("module", "train")) is None
