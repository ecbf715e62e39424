"""Invalid operations on a running job: the exit code, the message, and training continues."""

from __future__ import annotations

import os
import signal

from tests.integration.operations.test_operations import Running, running, weights

REFUSED = {
    # An unknown job
    ("stress", "no-such-job"): (1, "no-such-job"),
    ("nic", "no-such-job", "--to", "backup"): (1, "no-such-job"),
    ("profile", "no-such-job", "on"): (1, "no-such-job"),
    ("trace", "no-such-job"): (1, "no records of job no-such-job"),
    # An unknown rank
    ("nic", "JOB", "--rank", "7", "--to", "backup"): (
        1,
        "unknown rank 7 (job JOB: expected 0 to 3)",
    ),
    ("nic", "JOB", "--rank", "0,x", "--to", "backup"): (1, "unknown rank x"),
    ("nic", "JOB", "--rank", "", "--to", "backup"): (1, "no rank given"),
    # An unknown node
    ("stress", "JOB", "--nodes", "elsewhere"): (1, "413: the job has no pod on node 'elsewhere'"),
    ("stress", "JOB", "--nodes", ","): (1, "no node given"),
    # An unknown operation, or an operation that this job does not support
    ("stress", "JOB", "--ops", "hammer"): (1, "unknown test 'hammer' (expected compute or p2p)"),
    ("stress", "JOB", "--ops", "p2p,p2p"): (1, "given twice"),
    ("nic", "JOB", "--to", "sideways"): (2, "invalid choice: 'sideways'"),
    ("profile", "JOB", "on", "--domains", "step,dreams"): (1, "unknown dreams (expected"),
    ("profile", "JOB", "maybe"): (2, "invalid choice: 'maybe'"),
    # A rank that the job does not have
    ("fault", "JOB", "--rank", "7"): (1, "the job has no rank 7 (expected 0 to 3)"),
    ("fault", "JOB", "--rank", "1", "--rank", "4"): (1, "the job has no rank 4"),
    # `--nics` is not set
    ("nic", "JOB", "--to", "backup"): (1, "the job has no backup interface: start it with --nics"),
}
"""Arguments, exit code, and part of the output."""


def test_invalid_operations_are_refused_and_training_continues() -> None:
    with running(steps=60, pace_s=0.0) as job:
        codes, undisturbed = job.end()
    assert codes == [0]
    # The stopped rank of `during_an_incident` must not be replaced.
    with running(steps=60, pace_s=0.5, TASKD_STOPPED_S="60", TASKD_HANG_FLOOR_S="60") as job:
        job.at_step(3)
        for words, (code, says) in REFUSED.items():
            arguments = [word.replace("JOB", job.job) for word in words]
            actual, output = job.taskd(*arguments)
            assert (actual, says.replace("JOB", job.job) in output) == (code, True), (words, output)
        during_an_incident(job)
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == weights(undisturbed)


def during_an_incident(job: Running) -> None:
    """A stopped rank keeps the incident of another rank open; meanwhile operations are refused."""
    (stopped,) = (r["pid"] for r in job.at_step(4)["ranks"] if r.get("rank") == 2)
    os.kill(stopped, signal.SIGSTOP)
    try:
        code, output = job.taskd("fault", job.job, "--rank", "1", "--kind", "communication")
        assert code == 0, output
        for words in (("stress", job.job), ("nic", job.job, "--to", "backup")):
            code, output = job.taskd(*words)
            assert code == 1
            assert "411" in output, output
    finally:
        os.kill(stopped, signal.SIGCONT)
