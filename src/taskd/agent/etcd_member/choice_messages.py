"""How the nodes hear whether the job starts an etcd of its own: node 0 listens, the others ask.

    other node                         node 0, at the address where etcd would be
    HELLO                        -->
                                 <--   a random text
    what it has, signed          -->
                                 <--   an empty line per second, while other nodes are missing
                                 <--   the choice, signed

Everything is signed with the job's token: a stranger learns nothing and changes nothing. Once etcd
runs, the forwarder at that address gives the answer (`home_address.py`); in a job without etcd the
launcher of node 0 does. While node 0 waits for the others it also listens at the manager's address,
for a node that cannot reach the other one (a firewall, a service with a list of ports).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any

from taskd.core.etcd_choice import Heard, Offer, Runs, Stopped
from taskd.wire.json_reading import loads

HELLO = b"taskd etcd choice 1\n"
FAILED = (OSError, TimeoutError, EOFError, ValueError, KeyError, TypeError)
"""The peer has gone, is silent, or says what no node of this job says."""
TICK_S = 1.0
SILENT_S = 10.0
"""How long a peer may say nothing: node 0 sends an empty line each second."""
LINE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Answer:
    uses: bool
    """Whether the job uses an etcd of its own."""
    serves: bool = False
    """Whether that etcd runs already."""
    ended: str = ""
    """Why the job has ended before it began; empty: it has not."""


def choice_key(job: str, token: str) -> str:
    """Signs what the nodes of this job say."""
    return hmac.new(token.encode(), f"etcd choice of {job}".encode(), hashlib.sha256).hexdigest()


def signed(key: str, nonce: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body)
    return json.dumps({"body": text, "mac": _mac(key, nonce, text)}).encode() + b"\n"


def read_signed(key: str, nonce: str, line: bytes) -> dict[str, Any]:
    """Raises one of FAILED."""
    message = loads(line)
    if not isinstance(message, dict):
        raise TypeError("not an object")
    text, mac = str(message.get("body")), str(message.get("mac"))
    if not hmac.compare_digest(mac.encode(), _mac(key, nonce, text).encode()):
        raise ValueError("signed with another token, or for another job")
    body = loads(text)
    if not isinstance(body, dict):
        raise TypeError("not an object")
    return body


def _mac(key: str, nonce: str, text: str) -> str:
    return hmac.new(key.encode(), f"{nonce} {text}".encode(), hashlib.sha256).hexdigest()


def body_of(heard: Heard) -> dict[str, Any]:
    match heard:
        case Offer():
            return {"offer": asdict(heard)}
        case Runs(members):
            return {"runs": members}
        case Stopped(because):
            return {"stopped": because}


def heard_in(body: dict[str, Any]) -> Heard:
    """Raises one of FAILED."""
    if "offer" in body:
        return Offer(**body["offer"])
    if "runs" in body:
        return Runs(tuple(map(str, body["runs"])))
    return Stopped(str(body["stopped"]))
