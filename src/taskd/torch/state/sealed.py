"""Objects that ranks leave for each other in the store, authenticated with the job's key.

torch's store does not authenticate its clients, and unpickling runs code: without a valid seal
nothing is unpickled.
"""

from __future__ import annotations

import pickle
from functools import cache
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from taskd.config import load
from taskd.errors import Transient
from taskd.worker.settings import WorkerSettings

DIGEST = 16


class BadState(Transient):
    """The received state is damaged, or not the requested one."""


def seal(value: object) -> bytes:
    body = pickle.dumps(value)
    return _digest(body) + body


def unseal(sealed: bytes | bytearray) -> Any:
    body = bytes(sealed[DIGEST:])
    if not compare_digest(_digest(body), sealed[:DIGEST]):
        raise BadState("the data is damaged, or comes from another job")
    return pickle.loads(body)


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST, key=_key()).digest()


@cache
def _key() -> bytes:
    """Empty for a job without a key."""
    return load(WorkerSettings).seal.encode()[: blake2b.MAX_KEY_SIZE]
