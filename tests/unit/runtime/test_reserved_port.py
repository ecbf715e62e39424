"""A port that is kept for another program until that listens there."""

from __future__ import annotations

import socket

import pytest

from taskd.runtime.address import reserved_port

HOST = "127.0.0.1"


def listener(port: int, reuse: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        made.bind((HOST, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def test_program_that_it_is_kept_for_can_listen_again_and_again() -> None:
    with reserved_port(HOST) as kept:
        port = kept.getsockname()[1]
        for _ in range(2):
            listener(port, reuse=1).close()
        with pytest.raises(OSError, match="in use"):
            listener(port, reuse=0)


def test_kept_ports_differ() -> None:
    kept = [reserved_port(HOST) for _ in range(200)]
    assert len({one.getsockname()[1] for one in kept}) == 200
    for one in kept:
        one.close()


def test_port_is_kept_again_after_a_restart_but_not_while_another_program_listens() -> None:
    with reserved_port(HOST) as kept:
        port = kept.getsockname()[1]
    with reserved_port(HOST, port):
        pass
    with listener(port, reuse=1), pytest.raises(OSError, match="in use"):
        reserved_port(HOST, port)
