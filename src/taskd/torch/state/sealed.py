"""Objects that ranks leave for each other, under the job's key.

torch's store asks nobody who he is, so whoever reaches it could offer something of his own, and
unpickling is running what somebody has written: what does not bear the seal is not unpickled.
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
    """What came is not what was asked for."""


def seal(value: object) -> bytes:
    body = pickle.dumps(value)
    return _digest(body) + body


def unseal(letter: bytes | bytearray) -> Any:
    body = bytes(letter[DIGEST:])
    if not compare_digest(_digest(body), letter[:DIGEST]):
        raise BadState("it is damaged, or not of this job")
    return pickle.loads(body)


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST, key=_key()).digest()


@cache
def _key() -> bytes:
    """Empty for a job without one."""
    return load(WorkerSettings).seal.encode()[: blake2b.MAX_KEY_SIZE]
