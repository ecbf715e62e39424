"""Replaces this process by another program: `process_lifetime` has tied it to its parent before.

    python -m taskd.agent.process_lifetime PARENT_PID taskd.agent.etcd_member.exec_program PROGRAM …

The kernel keeps the tie when a process starts another program.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
