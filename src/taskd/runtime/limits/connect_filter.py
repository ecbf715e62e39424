"""Makes the kernel drop attempts to connect from some addresses, on our own listening sockets.

A classic BPF program, which needs no rights: Linux runs it for each packet that arrives at a
listening socket. It drops packets that begin a connection, and nothing else. Connections inherit
it, without effect: no such packet belongs to them.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import struct
from collections.abc import Iterable

from taskd.runtime.limits import connection_limit

log = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LOAD, LOAD_BYTE, AND, JUMP, EQUAL, RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
NETWORK_HEADER, RANDOM = 0xFFF00000, 0xFFFFF000 + 56
"""Where the program finds the header of IP, and a random number."""
TCP_FLAGS, SYN, ACK = 13, 0x02, 0x10
IPV4_SOURCE, IPV6_SOURCE = 12, 8
ACCEPT, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)

Instruction = tuple[int, int, int, int]
"""Code, steps to jump if true, if false, and a constant."""


def hold_off(port: int, addresses: Iterable[Address], pass_one_in: int) -> None:
    """From now on, for our sockets that listen on this port. Without addresses: no more."""
    chosen = sorted(addresses, key=str)
    try:
        if not chosen:
            connection_limit.set_option(port, SO_DETACH_FILTER, bytes(4))
            return
        made = b"".join(struct.pack("=HBBI", *one) for one in program(chosen, pass_one_in))
        code = ctypes.create_string_buffer(made, len(made))
        head = struct.pack("@HP", len(made) // 8, ctypes.addressof(code))
        connection_limit.set_option(port, SO_ATTACH_FILTER, head)
    except OSError as error:
        log.warning("connections cannot be held off by the kernel: %s", error)


def program(addresses: Iterable[Address], pass_one_in: int) -> list[Instruction]:
    """`pass_one_in` must be a power of two."""
    known = list(addresses)
    old = [int(one) for one in known if isinstance(one, ipaddress.IPv4Address)]
    new = [int(one) for one in known if isinstance(one, ipaddress.IPv6Address)]
    v4: list[Instruction] = [(LOAD, 0, 0, NETWORK_HEADER + IPV4_SOURCE)]
    for source in old:
        v4 += [(EQUAL, 0, 1, source), DROP]
    v6: list[Instruction] = []
    for source in new:
        for word in range(4):
            part = source >> (96 - 32 * word) & 0xFFFFFFFF
            left = 2 * (3 - word) + 1
            v6 += [(LOAD, 0, 0, NETWORK_HEADER + IPV6_SOURCE + 4 * word), (EQUAL, 0, left, part)]
        v6 += [DROP]
    return [
        (LOAD_BYTE, 0, 0, TCP_FLAGS),
        (AND, 0, 0, SYN | ACK),
        (EQUAL, 1, 0, SYN),
        ACCEPT,
        (LOAD, 0, 0, RANDOM),
        (AND, 0, 0, pass_one_in - 1),
        (EQUAL, 0, 1, 0),
        ACCEPT,
        (LOAD_BYTE, 0, 0, NETWORK_HEADER),
        (AND, 0, 0, 0xF0),
        (EQUAL, 1, 0, 0x40),
        (JUMP, 0, 0, len(v4) + 1),
        *v4,
        ACCEPT,
        *v6,
        ACCEPT,
    ]
