"""What `make demo` shows: one job, three faults, the same weights.

Four ranks train. One is killed with SIGKILL, one is stopped and hangs, the links of a third are
cut. Each incident is shown with its parts in milliseconds. At the end the weights are compared with
those of an undisturbed run.
"""

import signal

from watched import compare, training

STEPS = 200
PACE_S = 0.02

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print("four ranks; rank 2 is killed, rank 1 hangs, the links of rank 3 are cut")
with training("train_ddp.py", STEPS, PACE_S) as job:
    job.send_signal(2, signal.SIGKILL, job.at_step(20))
    job.send_signal(1, signal.SIGSTOP, job.recovered())
    job.cut_links(3, job.recovered())
    job.recovered()
    disturbed = job.end()

compare(disturbed, undisturbed)
