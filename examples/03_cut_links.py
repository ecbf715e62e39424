"""Four ranks train; the connections between one of them and the others break. No process restarts.

python examples/03_cut_links.py
"""

from watched import compare, pids, training

STEPS = 120
PACE_S = 0.02

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print("four ranks, the links of rank 3 are cut")
with training("train_ddp.py", STEPS, PACE_S) as job:
    before = job.at_step(20)
    job.cut_links(3, before)
    after = job.recovered()
    if pids(after) != pids(before):
        raise SystemExit("a process was restarted, although none had died")
    disturbed = job.end()

compare(disturbed, undisturbed)
