"""Where the nodes of `taskd run` meet and which of them this is, from torchrun's arguments.

With torchrun's `static` every node is told its rank. With `c10d` none has to be: the machine that
has the endpoint's address is the first, and the others draw theirs from its store (`places.py`).
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass

from taskd.config import environ

STATIC, C10D = "static", "c10d"
PORTS = {STATIC: 29500, C10D: 29400}
"""torchrun's."""
JOIN_TIMEOUT_S = 900.0
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    address: str
    port: int | None
    """None: any free one."""
    node: int
    draws: bool
    """Whether the node's rank is found out by meeting the others; until then it is the least."""
    hosts: bool | None
    """Whether this machine is the first node; None: look whether the address is its own."""
    join_timeout_s: float


def read(told: argparse.Namespace, nodes: int, problems: list[str]) -> Rendezvous:
    backend = str(told.rdzv_backend).lower()
    if backend not in PORTS:
        problems.append(
            f"--rdzv-backend {told.rdzv_backend} is not supported: take {C10D}, or {STATIC}"
        )
        backend = STATIC
    conf = _conf(told.rdzv_conf, problems)
    given = "node_rank" in getattr(told, "given", ()) or "PET_NODE_RANK" in environ
    draws = nodes > 1 and backend == C10D and not given and not told.standalone
    address, port = _endpoint(told, problems)
    if told.standalone or nodes == 1:
        address, port = "127.0.0.1", None if told.standalone else port
    elif port is None:
        port = PORTS[backend]
    hosts = _BOOLEANS.get(conf.get("is_host", "").lower())
    if "is_host" in conf and hosts is None:
        problems.append(f"--rdzv-conf: is_host must be true or false, got {conf['is_host']!r}")
    return Rendezvous(
        address,
        port,
        node=_node(told, nodes, problems),
        draws=draws,
        hosts=False if told.spare else hosts,
        join_timeout_s=_join_timeout_s(told, conf, problems),
    )


def is_here(host: str) -> bool:
    """Whether the name or address is this machine's own: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(place)
            except OSError:
                continue
            return True
    return False


def everywhere(host: str) -> str:
    """All addresses of this machine, of the family in which the others know it."""
    try:
        families = {found[0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return "0.0.0.0"
    return "::" if families == {socket.AF_INET6} else "0.0.0.0"


def _node(told: argparse.Namespace, nodes: int, problems: list[str]) -> int:
    node: int = told.node_rank
    if not told.spare:
        if not 0 <= node < max(nodes, 1):
            problems.append(f"--node-rank {node} is not one of {nodes} nodes; is it a --spare?")
        return node
    if nodes < 2:
        problems.append("--spare: the spare stands in for one of several --nnodes")
    if 0 < node < nodes:
        problems.append(f"--spare: --node-rank {node} is one of the {nodes} nodes themselves")
    return node or nodes


def _endpoint(told: argparse.Namespace, problems: list[str]) -> tuple[str, int | None]:
    port = None if told.master_port is None else int(told.master_port)
    if not told.rdzv_endpoint:
        return told.master_addr.strip("[]"), port
    host, colon, tail = told.rdzv_endpoint.rpartition(":")
    if not colon:
        return tail.strip("[]"), port
    if not tail.isdecimal() or int(tail) > 65535:
        problems.append(f"--rdzv-endpoint must be HOST:PORT, got {told.rdzv_endpoint!r}")
        return host, None
    return host.strip("[]"), int(tail) or None


def _conf(text: str, problems: list[str]) -> dict[str, str]:
    """As torchrun reads it: keys that nobody knows are left alone."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    read = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(key and value for key, value in read.items()):
        problems.append(f"--rdzv-conf must be KEY=VALUE,…; got {text!r}")
    return read


def _join_timeout_s(told: argparse.Namespace, conf: dict[str, str], problems: list[str]) -> float:
    if told.join_timeout is not None:
        return float(told.join_timeout)
    for key in ("join_timeout", "timeout"):
        if key in conf:
            if conf[key].isdecimal() and int(conf[key]) > 0:
                return float(conf[key])
            problems.append(f"--rdzv-conf: {key} must be a number of seconds, got {conf[key]!r}")
    return JOIN_TIMEOUT_S
