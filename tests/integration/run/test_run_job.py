"""The tests' own way to run a job: what it shows when the job hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.run.run_job import Job, script

HANGS = """
    import threading

    def wait_for_ever():
        threading.Event().wait()

    print("waits", flush=True)
    wait_for_ever()
"""


def test_job_that_does_not_end_shows_where_its_ranks_are(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nproc-per-node", "2", script(tmp_path, HANGS))
    job.wait_for("waits")
    job.wait_for("waits")
    with pytest.raises(AssertionError, match="has not ended after 0 s") as failed:
        job.end(deadline_s=0)
    shown = str(failed.value)
    assert "taskd:rank0" in shown
    assert shown.count("in wait_for_ever") == 2
