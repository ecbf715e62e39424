"""Four ranks train; one is killed with SIGKILL in the middle of a step. Nothing is lost.

python examples/01_kill_a_rank.py
"""

import signal

from watched import compare, training

STEPS = 200
PACE_S = 0.02

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print("four ranks; rank 2 is killed, later rank 0")
with training("train_ddp.py", STEPS, PACE_S) as job:
    job.send_signal(2, signal.SIGKILL, job.at_step(20))
    job.recovered()
    job.send_signal(0, signal.SIGKILL, job.at_step(70))
    job.recovered()
    disturbed = job.end()

compare(disturbed, undisturbed)
