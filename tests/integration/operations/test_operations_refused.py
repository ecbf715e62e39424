"""What a person asks for in vain, beside a running job: the code, the words, and it trains on."""

from __future__ import annotations

import os
import signal

from tests.integration.operations.test_operations import Running, running, weights

ASKED = {
    # An unknown job
    ("stress", "nobody"): (1, "nobody"),
    ("nic", "nobody", "--to", "backup"): (1, "nobody"),
    ("profile", "nobody", "on"): (1, "nobody"),
    ("trace", "nobody"): (1, "there are no records of nobody"),
    # An unknown rank
    ("nic", "JOB", "--rank", "7", "--to", "backup"): (1, "7 is no rank of JOB: there are 0 to 3"),
    ("nic", "JOB", "--rank", "0,x", "--to", "backup"): (1, "x is no rank"),
    ("nic", "JOB", "--rank", "", "--to", "backup"): (1, "nothing is no rank"),
    # An unknown node
    ("stress", "JOB", "--nodes", "elsewhere"): (1, "413: the job has no pod on node 'elsewhere'"),
    ("stress", "JOB", "--nodes", ","): (1, "no node is named"),
    # An unknown operation, or a thing that it cannot be done with
    ("stress", "JOB", "--ops", "hammer"): (1, "'hammer' is none of compute, p2p"),
    ("stress", "JOB", "--ops", "p2p,p2p"): (1, "named twice"),
    ("nic", "JOB", "--to", "sideways"): (2, "invalid choice: 'sideways'"),
    ("profile", "JOB", "on", "--domains", "step,dreams"): (1, "dreams is none of"),
    ("profile", "JOB", "maybe"): (2, "invalid choice: 'maybe'"),
    ("nic", "JOB", "--to", "backup"): (2, "switch nic failed"),
}
"""Words, exit code, and what the person reads. The last needs `--nics`, which the job lacks."""


def test_each_is_refused_with_its_code_and_training_goes_on() -> None:
    with running(steps=60, pace_s=0.0) as job:
        codes, calm = job.end()
    assert codes == [0]
    with running(steps=60, pace_s=0.5) as job:
        job.at_step(3)
        for words, (code, says) in ASKED.items():
            asked = [word.replace("JOB", job.job) for word in words]
            got, told = job.taskd(*asked)
            assert (got, says.replace("JOB", job.job) in told) == (code, True), (words, told)
        in_a_round(job)
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == weights(calm)


def in_a_round(job: Running) -> None:
    """A rank stands still, so that the round about another one waits for it."""
    (still,) = (r["pid"] for r in job.at_step(4)["ranks"] if r.get("rank") == 2)
    os.kill(still, signal.SIGSTOP)
    try:
        code, told = job.taskd("fault", job.job, "--rank", "1", "--kind", "communication")
        assert code == 0, told
        for words in (("stress", job.job), ("nic", job.job, "--to", "backup")):
            code, told = job.taskd(*words)
            assert code == 1
            assert "411" in told, told
    finally:
        os.kill(still, signal.SIGCONT)
