"""One of two nodes is lost; the other continues alone, and both continue once the node is back.

The global batch stays the same: the remaining ranks take over the parts of the missing ones.

python examples/05_lose_a_node.py
"""

from watched import training

STEPS = 400
PACE_S = 0.03

print("two nodes with two ranks each; the launcher of node 1 is killed, and started again later")
with training(
    "train_elastic.py", STEPS, PACE_S, options=("--strategies", "elastic-training"), nodes=2
) as job:
    job.lose_node(1, job.at_step(20))
    job.at_size(2)
    job.return_node(1)
    job.at_size(4)
    job.end()

if f"each of {STEPS * 4} samples used once: yes" not in "".join(job.output):
    raise SystemExit("a sample was lost or used twice")
