"""Run a script of the gallery twice: undisturbed, and with random faults. Same weights?

python examples/try_gallery.py cnn.py [SEED]
"""

import os
import random
import re
import signal
import sys
import threading
from contextlib import suppress

from watched import Job, say, training

RANKS = {"tp_fsdp2.py": 4}
PACE_S = 0.05
FAULTS = 3
LATEST_STEP = 30


def weights(job: Job) -> dict[str, str]:
    """What each rank has printed at its end."""
    job.end()
    return dict(re.findall(r"rank (\d+) weights (\w+)", "".join(job.output)))


def inject(job: Job, chance: random.Random, step: int, ranks: int) -> None:
    view = job.at_step(step)
    if view["line"]["step"] > LATEST_STEP:
        return say("the job is too fast for another fault")
    threading.Event().wait(chance.uniform(0, PACE_S))  # anywhere in the step, or after it
    rank = chance.randrange(ranks)
    match chance.choice(["kill", "kill", "stop", "cut"]):
        case "kill":
            job.send_signal(rank, signal.SIGKILL, view)
        case "stop":
            job.send_signal(rank, signal.SIGSTOP, view)
        case "cut":
            job.cut_links(rank, view)
    with suppress(SystemExit):  # the job may end before its last views are seen
        job.recovered()


script, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1000)
ranks, chance = RANKS.get(script, 2), random.Random(seed)
os.environ["GALLERY_PACE_S"] = str(PACE_S)
say(f"{script} on {ranks} ranks, undisturbed")
with training(f"gallery/{script}", ranks=ranks) as job:
    undisturbed = weights(job)
say(f"{script} with {FAULTS} faults, seed {seed}")
with training(f"gallery/{script}", ranks=ranks) as job:
    for step in sorted(chance.sample(range(2, LATEST_STEP), FAULTS)):
        inject(job, chance, step, ranks)
    disturbed = weights(job)
same = len(undisturbed) == ranks and disturbed == undisturbed
print("weights identical to the undisturbed run:", "yes" if same else "no")
sys.exit(0 if same else 1)
