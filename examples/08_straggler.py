"""Four ranks train; one of them is throttled. Which rank makes the others wait, how long, and why?

python examples/08_straggler.py
"""

import os
import signal
import subprocess
import tempfile
import threading

from watched import TASKD, compare, pids, say, training

STEPS = 500
PACE_S = 0.02
THROTTLED = 2
STOPPED_S, RUNNING_S = 0.06, 0.04
os.environ["TASKD_STRAGGLER_WINDOW_S"] = "4"


def throttle(pid: int, over: threading.Event) -> None:
    """Do what a processor quota does: run for a moment, then stop for a moment."""
    try:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(RUNNING_S)
    except ProcessLookupError:
        pass


print("four ranks, all equally fast")
with training("train_ddp.py", STEPS, 0) as job:
    undisturbed = job.end()

print(f"four ranks, rank {THROTTLED} is stopped for 60 of every 100 ms")
with tempfile.TemporaryDirectory() as folder:
    os.environ["TASKD_PROFILING_DIR"] = folder
    with training("train_ddp.py", STEPS, PACE_S) as job:
        view = job.at_step(20)
        subprocess.run([TASKD, "profile", job.id, "on"], check=True, stdout=subprocess.DEVNULL)
        over = threading.Event()
        throttled = threading.Thread(target=throttle, args=(pids(view)[THROTTLED], over))
        throttled.start()
        try:
            view = job.until(lambda view: bool(view["stragglers"]), "a straggler was named")
        finally:
            over.set()
            throttled.join()
        for straggler in view["stragglers"]:
            say(straggler["evidence"])
        named = [(slow["rank"], slow["cause"]) for slow in view["stragglers"]]
        if named != [(THROTTLED, "compute")]:
            raise SystemExit(f"expected rank {THROTTLED} with cause compute, got {named}")
        disturbed = job.end()

compare(disturbed, undisturbed)
