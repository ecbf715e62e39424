from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from taskd.torch.groups import store
from taskd.torch.groups.store import Rendezvous

HOST = "127.0.0.1"
WAIT_S = 60.0


def test_rank_leaves_a_store_that_does_not_answer_and_finds_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher's port is open, but the process that serves the store is dead."""
    monkeypatch.setattr(store, "ANSWER_S", 0.2)
    listener = socket.create_server((HOST, 0))
    listener.settimeout(WAIT_S)
    address = f"{HOST}:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        limit = timedelta(seconds=WAIT_S)
        met = pool.submit(Rendezvous, address, "incident 1/", limit)
        silent, _ = listener.accept()
        with silent:
            silent.settimeout(WAIT_S)
            while silent.recv(4096):
                pass  # until the rank has given it up
        listener.settimeout(None)
        port, descriptor = listener.getsockname()[1], listener.detach()
        served = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        rendezvous = met.result(WAIT_S)
        rendezvous.store.set("key", "value")
        assert rendezvous.store.get("key") == b"value"
        del served  # not earlier
