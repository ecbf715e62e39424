"""Four ranks train, pause for a stress test, and continue with the same result.

python examples/10_stress_test.py
"""

import os
import subprocess

from watched import TASKD, compare, say, training

STEPS = 200
PACE_S = 0.05

os.environ |= {"TASKD_STRESS_COMPUTE_S": "1", "TASKD_STRESS_P2P_MB": "4"}


def stress(job_id: str, *options: str) -> int:
    done = subprocess.run([TASKD, "stress", job_id, *options], capture_output=True, text=True)
    for line in (done.stdout + done.stderr).splitlines():
        say(line)
    return done.returncode


print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print("four ranks, tested after their first step and again later")
with training("train_ddp.py", STEPS, PACE_S, options=("--precheck",)) as job:
    job.recovered()
    job.at_step(30)
    if stress(job.id) != 0:
        raise SystemExit("healthy devices failed the test")
    if stress(job.id, "--ops", "magic") == 0 or stress(job.id, "--nodes", "nowhere") == 0:
        raise SystemExit("an invalid request was accepted")
    disturbed = job.end()

compare(disturbed, undisturbed)

print("four ranks; a bit flips in a product of rank 2")
os.environ["TASKD_STRESS_INJECT"] = "flip:2"
with training("train_ddp.py", 10 * STEPS, PACE_S) as job:
    job.at_step(5)
    found = stress(job.id, "--ops", "compute")
    print(f"the faulty device was found: {'yes' if found == 2 else 'NO'}")
    if found != 2:
        raise SystemExit(1)
