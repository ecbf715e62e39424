"""FSDP2 on two nodes: each weight exists once. A rank is killed, then a whole node with its memory.

The rank's quarter of the state comes back from its node's shared memory; the lost node's, from
the copies that its ranks' buddies have kept on the other one.

python examples/04_fsdp2_buddies.py
"""

import signal

from watched import compare, training

STEPS = 100
PACE_S = 0.02

print("two nodes of two ranks, undisturbed")
with training("train_fsdp.py", STEPS, PACE_S, nodes=2) as job:
    undisturbed = job.end()

print("two nodes of two ranks, rank 2 is killed, and later its whole node")
with training("train_fsdp.py", STEPS, PACE_S, nodes=2) as job:
    job.hurt(2, signal.SIGKILL, job.at_step(15))
    job.recovered()
    job.lose_node(1, job.at_step(45))
    job.return_node(1)
    job.recovered()
    disturbed = job.end()

compare(disturbed, undisturbed)
