"""Repair is not allowed: the survivors write a checkpoint, and the next start resumes from it.

python examples/06_emergency_checkpoint.py
"""

import signal
import tempfile

from watched import compare, training

STEPS = 120
PACE_S = 0.02

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

with tempfile.TemporaryDirectory() as folder:
    options = ("--strategies", "dump")
    print("four ranks; only an emergency checkpoint is allowed; rank 2 is killed")
    with training("train_ddp.py", STEPS, PACE_S, options=options, folder=folder) as job:
        job.send_signal(2, signal.SIGKILL, job.at_step(20))
        job.fail()
    print("the same command again")
    with training("train_ddp.py", STEPS, PACE_S, options=options, folder=folder) as job:
        resumed = job.end()

compare(resumed, undisturbed)
