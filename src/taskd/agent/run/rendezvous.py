"""Where the nodes of `taskd run` meet, and which of them this is, from torchrun's arguments.

With torchrun's `static` backend every node is given its rank. With `c10d` this is not needed: the
machine that has the endpoint's address is node 0, and the others draw their rank from its store
(`node_ranks.py`).
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass

from taskd.config import environ

STATIC, C10D = "static", "c10d"
PORTS = {STATIC: 29500, C10D: 29400}
"""torchrun's default ports."""
JOIN_TIMEOUT_S = 900.0
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    address: str
    port: int | None
    """None: any free port."""
    node: int
    draws_rank: bool
    """Whether the node draws its rank; `node` is then the lowest rank that it may get."""
    is_first_node: bool | None
    """Whether this machine is the first node; None: it is, if the address is its own."""
    join_timeout_s: float


def read(args: argparse.Namespace, nodes: int, problems: list[str]) -> Rendezvous:
    backend = str(args.rdzv_backend).lower()
    if backend not in PORTS:
        problems.append(
            f"--rdzv-backend {args.rdzv_backend} is not supported: use {C10D} or {STATIC}"
        )
        backend = STATIC
    conf = _conf(args.rdzv_conf, problems)
    given = "node_rank" in getattr(args, "given", ()) or "PET_NODE_RANK" in environ
    draws_rank = nodes > 1 and backend == C10D and not given and not args.standalone
    address, port = _endpoint(args, problems)
    if args.standalone or nodes == 1:
        address, port = "127.0.0.1", None if args.standalone else port
    elif port is None:
        port = PORTS[backend]
    is_first_node = _BOOLEANS.get(conf.get("is_host", "").lower())
    if "is_host" in conf and is_first_node is None:
        problems.append(f"--rdzv-conf: is_host must be true or false, got {conf['is_host']!r}")
    return Rendezvous(
        address,
        port,
        node=_node(args, nodes, problems),
        draws_rank=draws_rank,
        is_first_node=False if args.spare else is_first_node,
        join_timeout_s=_join_timeout_s(args, conf, problems),
    )


def is_local_address(host: str) -> bool:
    """Whether this machine has that name or address: only then can a socket be bound to it."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:
                continue
            return True
    return False


def wildcard_address(host: str) -> str:
    """The address that stands for all of this machine, in the family that the other nodes use."""
    try:
        families = {info[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return "0.0.0.0"
    return "::" if families == {socket.AF_INET6} else "0.0.0.0"


def _node(args: argparse.Namespace, nodes: int, problems: list[str]) -> int:
    node: int = args.node_rank
    if not args.spare:
        if not 0 <= node < max(nodes, 1):
            problems.append(
                f"--node-rank {node} is out of range: with --nnodes {nodes}, expected 0 to "
                f"{nodes - 1}; for a further node, add --spare"
            )
        return node
    if nodes < 2:
        problems.append("--spare needs --nnodes of 2 or more: a spare replaces a lost node")
    if 0 < node < nodes:
        problems.append(
            f"--spare: --node-rank {node} belongs to one of the {nodes} regular nodes; expected "
            f"{nodes} or more"
        )
    return node or nodes


def _endpoint(args: argparse.Namespace, problems: list[str]) -> tuple[str, int | None]:
    port = None if args.master_port is None else int(args.master_port)
    if not args.rdzv_endpoint:
        return args.master_addr.strip("[]"), port
    host, colon, tail = args.rdzv_endpoint.rpartition(":")
    if not colon:
        return tail.strip("[]"), port
    if not tail.isdecimal() or int(tail) > 65535:
        problems.append(f"--rdzv-endpoint must be HOST:PORT, got {args.rdzv_endpoint!r}")
        return host, None
    return host.strip("[]"), int(tail) or None


def _conf(text: str, problems: list[str]) -> dict[str, str]:
    """Parsed as torchrun does: unknown keys are ignored."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(key and value for key, value in conf.items()):
        problems.append(f"--rdzv-conf must be KEY=VALUE,KEY=VALUE,…, got {text!r}")
    return conf


def _join_timeout_s(args: argparse.Namespace, conf: dict[str, str], problems: list[str]) -> float:
    if args.join_timeout is not None:
        return float(args.join_timeout)
    for key in ("join_timeout", "timeout"):
        if key in conf:
            if conf[key].isdecimal() and int(conf[key]) > 0:
                return float(conf[key])
            problems.append(f"--rdzv-conf: {key} must be a number of seconds, got {conf[key]!r}")
    return JOIN_TIMEOUT_S
