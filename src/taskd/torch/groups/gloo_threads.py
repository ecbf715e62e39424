"""Whether gloo's threads still work, or sleep for good.

After a group was cut off, a thread of gloo either comes to its end within moments or, because of
a wake-up that gloo loses, sleeps until its timeout. The memory of the step may be used again only
when none of them is at work; the kernel knows.
"""

from __future__ import annotations

import os

FOLDER = "/proc/self/task"
NAME = "pt_gloo_runloop"


def at_work() -> dict[int, str]:
    """Every thread of gloo's: its number, and what changes whenever it runs."""
    found = {}
    for name in os.listdir(FOLDER):
        try:
            with open(f"{FOLDER}/{name}/comm") as file:
                if file.read().strip() != NAME:
                    continue
            with open(f"{FOLDER}/{name}/status") as file:
                lines = file.read().splitlines()
        except OSError:
            continue  # ended since
        told = [line for line in lines if "State" in line or "ctxt_switches" in line]
        found[int(name)] = " ".join(told)
    return found


def asleep(before: dict[int, str], now: dict[int, str]) -> bool:
    """Nobody has run in between, and nobody is about to."""
    return before == now and all("S (sleeping)" in told for told in now.values())
