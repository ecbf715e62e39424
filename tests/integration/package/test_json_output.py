"""The JSON that commands print about a real job has the documented format."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.json_schema import check

TASKD = [sys.executable, "-m", "taskd"]
STEPS = 200
LIMIT_S = 120


def environment(folder: Path) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("TASKD_")}
    return known | {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": str(folder)}


def taskd(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [*TASKD, *args],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_output_of_each_command_matches_its_schema(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    script = str(ROOT / "examples/train_ddp.py")
    options = ["--nproc-per-node=2", "--job-id=json", f"--state-dir={tmp_path / 'state'}"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [*TASKD, "run", *options, script, str(STEPS), "0.1"],
            env=environment(tmp_path),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        watch_through_a_fault(tmp_path)
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
        job.wait()
    journal = str(tmp_path / "state/clusterd.journal")
    lines = taskd(tmp_path, "replay", "json", "--json", "--journal", journal).splitlines()
    decisions = [check("replay", line) for line in lines]
    assert [line["number"] for line in decisions] == sorted(line["number"] for line in decisions)
    assert any(line["incident"] == 1 for line in decisions)
    assert taskd(tmp_path, "replay", "other", "--json", "--journal", journal) == ""
    assert check("doctor", taskd(tmp_path, "doctor", "--json"))["works"] is True


def watch_through_a_fault(folder: Path) -> None:
    """Wait for the first steps, report a fault, and wait until the job trains again."""
    while True:
        found = subprocess.run(
            [*TASKD, "status", "json", "--json"],
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if found.returncode == 0 and check("status", found.stdout)["line"]["step"] >= 3:
            break
    listed = check("jobs", taskd(folder, "jobs", "--json"))
    assert [(line["job"], line["world"]) for line in listed["jobs"]] == [("json", 2)]
    taskd(folder, "fault", "json", "--rank", "1", "--kind", "process", "--because", "a test")
    watching = subprocess.Popen(
        [*TASKD, "status", "json", "--watch", "--json"],
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    try:
        for text in watching.stdout:
            status = check("status", text)
            if status["rounds"] and status["line"]["state"] == "Idle":
                break
        assert status["rounds"][0]["incident"] == 1
        assert status["rounds"][0]["tookMs"] > 0
        assert {rank["rank"] for rank in status["ranks"]} == {0, 1}
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()
