"""Tries whether TaskD works with the installed torch: `taskd run` starts it for untested versions.

`main` runs in a process of its own. It looks for every private name that TaskD relies on, and
trains a step without peers: a name may still be there, but behave differently.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from taskd.torch import compat
from taskd.torch.startup import warmup


def main() -> None:
    """Exit with 0, or with 1 and the reason in the last line of stderr."""
    problem = find_problem()
    with suppress(OSError):
        sys.stderr.write(problem)
        sys.stderr.flush()
    os._exit(1 if problem else 0)  # libraries may print more when the interpreter exits


def find_problem() -> str:
    """In one line; empty: none was found."""
    try:
        compat.check_all()
        warmup.train()
    except Exception as error:  # noqa: BLE001 - an unknown torch can raise anything
        return " ".join(f"{type(error).__name__}: {error}".splitlines())
    return ""
