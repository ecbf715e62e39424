"""Four ranks train; one is stopped and hangs for ever. It is named, killed and replaced.

python examples/02_hung_rank.py
"""

import signal

from watched import compare, training

STEPS = 120
PACE_S = 0.02

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS) as job:
    undisturbed = job.end()

print("four ranks; rank 1 is stopped")
with training("train_ddp.py", STEPS, PACE_S) as job:
    job.send_signal(1, signal.SIGSTOP, job.at_step(20))
    job.recovered()
    disturbed = job.end()

compare(disturbed, undisturbed)
