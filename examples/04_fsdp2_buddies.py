"""FSDP2 on two nodes: each weight exists once. A rank is killed, then a whole node with its memory.

The state of the killed rank comes from the snapshot in its node's shared memory. The state of the
lost node comes from the copies that the buddies of its ranks keep on the other node.

python examples/04_fsdp2_buddies.py
"""

import signal

from watched import compare, training

STEPS = 100
PACE_S = 0.02

print("two nodes with two ranks each, undisturbed")
with training("train_fsdp.py", STEPS, PACE_S, nodes=2) as job:
    undisturbed = job.end()

print("two nodes with two ranks each; rank 2 is killed, later its whole node")
with training("train_fsdp.py", STEPS, PACE_S, nodes=2) as job:
    job.send_signal(2, signal.SIGKILL, job.at_step(15))
    job.recovered()
    job.lose_node(1, job.at_step(45))
    job.return_node(1)
    job.recovered()
    disturbed = job.end()

compare(disturbed, undisturbed)
