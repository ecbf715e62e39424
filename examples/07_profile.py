"""Four ranks train; recording is switched on for a while, without stopping them.

python examples/07_profile.py
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from watched import TASKD, compare, say, training

STEPS = 120
PACE_S = 0.02


def taskd(*args: str) -> None:
    output = subprocess.run([TASKD, *args], check=True, capture_output=True, text=True).stdout
    say(output.strip())


print("four ranks, not recorded")
with training("train_ddp.py", STEPS, PACE_S) as job:
    undisturbed = job.end()

print("four ranks, recorded from about step 20 to about step 80")
with tempfile.TemporaryDirectory() as folder:
    os.environ["TASKD_PROFILING_DIR"] = f"{folder}/profiling"
    with training("train_ddp.py", STEPS, PACE_S) as job:
        job.at_step(20)
        taskd("profile", job.id, "on")
        job.until(lambda view: "on 4 ranks" in view["profiling"], "all ranks were recorded")
        job.at_step(80)
        taskd("profile", job.id, "off")
        recorded = job.end()
    trace = Path(folder, "trace.json")
    taskd("trace", job.id, "-o", str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    for rank in range(4):
        names = [event["name"].split()[0] for event in events if event["pid"] == rank]
        counts = {name: names.count(name) for name in sorted(set(names))}
        say(f"rank {rank}: {counts}")
        if not {"allreduce", "forward", "step"} <= set(names):
            raise SystemExit(f"rank {rank} was not recorded")

compare(recorded, undisturbed)
