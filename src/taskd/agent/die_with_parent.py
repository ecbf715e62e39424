"""Runs a module in a process that cannot outlive its parent, by its name and arguments."""

from __future__ import annotations

import os
import runpy
import sys

from taskd.agent import linux


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    linux.die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"{module}: the parent was gone before we began")
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
