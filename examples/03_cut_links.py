"""Two machines train; the cable between them is cut. The links move to another one; no restart.

The machines are network namespaces, which only root can create. Without them, four ranks train on
one machine, and the connections between one of them and the others are cut.

python examples/03_cut_links.py
"""

from machines import Machines, two_machines
from watched import Job, compare, pids, say, training

STEPS = 120
PACE_S = 0.02


def cut_the_cable(machines: Machines) -> str:
    print("two machines with two ranks each; the cable between them is cut")
    options = ("--nics", "eth0,eth1", "--nic-failover")
    with training("train_ddp.py", STEPS, PACE_S, options=options, machines=machines) as job:
        before = pids(job.at_step(20))
        machines.cut(0)
        say("eth0 cut")
        return end_with_same_processes(job, before)


def cut_the_connections() -> str:
    print("four ranks; the links of rank 3 are cut")
    with training("train_ddp.py", STEPS, PACE_S) as job:
        view = job.at_step(20)
        job.cut_links(3, view)
        return end_with_same_processes(job, pids(view))


def end_with_same_processes(job: Job, before: dict[int, int]) -> str:
    if pids(job.recovered()) != before:
        raise SystemExit("a process was restarted although none had died")
    return job.end()


print("four ranks, undisturbed")
with training("train_ddp.py", STEPS) as job:
    undisturbed = job.end()

with two_machines() as machines:
    disturbed = cut_the_cable(machines) if machines else cut_the_connections()

compare(disturbed, undisturbed)
