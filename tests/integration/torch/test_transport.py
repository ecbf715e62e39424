"""The real group under a resilient one, once it has been given up."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import HashStore

from taskd.torch.groups.transport import Shape, Transport


def test_one_that_is_buried_leaves_the_sockets_of_its_successors_alone() -> None:
    """An abort may come late, from another thread, when the next group is there already."""
    shape = Shape("", (0,), 0, timedelta(seconds=5), {"cpu": "gloo"})
    old, not_buried = Transport(shape, HashStore()), Transport(shape, HashStore())
    for one in (old, not_buried):
        one.form()
    old.bury(at_rest=True)
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname(), timeout=5)
        there, _ = door.accept()
        with here, there:
            old.abort()
            here.sendall(b"still there")
            assert there.recv(100) == b"still there"
            not_buried.abort()  # to it they look like its own
            assert there.recv(100) == b""
    not_buried.bury(at_rest=True)
