"""Tells a standby whether its job uses torch.compile: it then imports the compiler in advance.

The compiler takes a second to import and tens of megabytes, so only a job that uses it should pay.
A rank that runs compiled code has mapped a library from the compiler's cache.
"""

from __future__ import annotations

import select
import socket
from pathlib import Path

from taskd import config

COMPILED = (b"torchinductor", b".main.so", b"/.triton/")
FIRST_LOOK_S, LONGEST_S = 1.0, 60.0


def wait(connection: socket.socket, sibling: int) -> bool:
    """Wait until this rank runs compiled code. False: a message came first, or the rank is gone."""
    wait_s = FIRST_LOOK_S
    while sibling and not select.select([connection], [], [], wait_s)[0]:
        try:
            if runs_compiled_code(sibling):
                return True
        except OSError:
            return False
        wait_s = min(2 * wait_s, LONGEST_S)
    return False


def runs_compiled_code(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps").read_bytes()
    chosen = config.environ.get("TORCHINDUCTOR_CACHE_DIR", "").encode()
    return any(name in maps for name in (*COMPILED, chosen) if name)
