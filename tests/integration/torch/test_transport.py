"""The real group under a resilient one, after it has been discarded."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore

from taskd.torch.groups.transport import Shape, Transport


def test_discarded_group_leaves_new_sockets_alone() -> None:
    """An abort may come late, from another thread, when the next group exists already."""
    shape = Shape("", (0,), 0, timedelta(seconds=5), {"cpu": "gloo"})
    old, not_discarded = Transport(shape, HashStore()), Transport(shape, HashStore())
    for one in (old, not_discarded):
        one.form()
    old.discard(idle=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=5)
        peer, _ = server.accept()
        with client, peer:
            old.abort()
            client.sendall(b"still there")
            assert peer.recv(100) == b"still there"
            not_discarded.abort()  # for this one they are new sockets of its own
            assert peer.recv(100) == b""
    not_discarded.discard(idle=True)
