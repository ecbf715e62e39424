"""Four ranks train; their links move to another network interface and back. No process restarts.

python examples/09_switch_nic.py [PRIMARY BACKUP]      # default: two interfaces that are up
"""

import subprocess
import sys
from pathlib import Path

from watched import TASKD, compare, say, training

STEPS = 200
PACE_S = 0.05


def interfaces() -> list[str]:
    """The interfaces that are up and have an address, loopback first."""
    listed = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True).stdout
    named = [line.split()[1] for line in listed.splitlines()]
    up = [name for name in named if _carrier(name)]
    return sorted(set(up), key=lambda name: (name != "lo", name))


def _carrier(name: str) -> bool:
    try:
        return Path("/sys/class/net", name, "carrier").read_text().strip() == "1"
    except OSError:
        return False


def switch(job_id: str, *options: str) -> int:
    done = subprocess.run([TASKD, "nic", job_id, *options], capture_output=True, text=True)
    say(f"taskd nic {' '.join(options)}: {(done.stdout + done.stderr).strip()}")
    return done.returncode


primary, backup = sys.argv[1:3] if len(sys.argv) > 2 else [*interfaces(), "", ""][:2]
if not backup:
    raise SystemExit("this machine has only one interface: there is nothing to switch to")

print("four ranks, undisturbed")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print(f"four ranks that move from {primary} to {backup} and back")
with training("train_ddp.py", STEPS, PACE_S, options=("--nics", f"{primary},{backup}")) as job:
    before = {rank["pid"] for rank in job.at_step(20)["ranks"]}
    if switch(job.id, "--rank", "all", "--to", "backup") != 0:
        raise SystemExit("the links did not move")
    job.at_step(50)
    if switch(job.id, "--rank", "0,1,2,3", "--to", "primary") != 0:
        raise SystemExit("the links did not come back")
    if switch(job.id, "--rank", "17", "--to", "backup") == 0:
        raise SystemExit("a rank that does not exist was switched")
    after = {rank["pid"] for rank in job.at_step(70)["ranks"]}
    disturbed = job.end()

print(f"all processes are still the same: {'yes' if before == after else 'NO'}")
compare(disturbed, undisturbed)
