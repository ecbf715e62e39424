"""Objects that ranks leave for each other in the store, authenticated with the job's key.

torch's store does not authenticate its clients, and unpickling runs code: without a valid seal
nothing is unpickled. A seal is valid for one place only, so that two values cannot be exchanged.
"""

from __future__ import annotations

import pickle
from functools import cache
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from taskd.bus.security import BADGE, make_seal
from taskd.config import environ, load
from taskd.errors import SettingsError, Transient
from taskd.worker.settings import WorkerSettings

DIGEST = 16


class BadState(Transient):
    """The received state is damaged, or not the requested one."""


def seal(value: object, place: str, key: bytes | None = None) -> bytes:
    """`place` says what it is and where it belongs; `unseal` must name the same one."""
    return seal_pickled(pickle.dumps(value), place, key)


def seal_pickled(body: bytes, place: str, key: bytes | None = None) -> bytes:
    return sign(body, place, key) + body


def unseal(sealed: bytes | bytearray, place: str, key: bytes | None = None) -> Any:
    body = bytes(sealed[DIGEST:])
    if not compare_digest(sign(body, place, key), sealed[:DIGEST]):
        raise BadState(f"the {place} is damaged, or comes from another job or place")
    return pickle.loads(body)


def in_this_attempt(place: str) -> str:
    """A place whose values are valid until all ranks restart: an older one cannot be planted."""
    return f"{place} in attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def sign(data: bytes, place: str, key: bytes | None = None) -> bytes:
    """A digest of the data and its place, with the key of the job or another one."""
    digest = blake2b(digest_size=DIGEST, key=_key() if key is None else key)
    name = place.encode()
    digest.update(len(name).to_bytes(4, "little") + name)
    digest.update(data)
    return digest.digest()


def key_for(purpose: str) -> bytes:
    """A key of its own for this purpose, derived from the job's."""
    return blake2b(purpose.encode(), digest_size=32, key=_key()).digest()


def check_key() -> None:
    """Raise SettingsError if this process must not unpickle anything."""
    _key()


@cache
def _key() -> bytes:
    settings = load(WorkerSettings)
    key = settings.seal
    if not key and settings.token and not settings.token.startswith(BADGE):
        key = make_seal(settings.token, settings.job_id)
    if not key and not settings.insecure:
        raise SettingsError(
            [
                "the job has no secret, and without one any process that reaches its store could "
                "run code in its ranks: set TASKD_TOKEN to the same value on all nodes. In a "
                "network that you trust completely, TASKD_INSECURE=1 starts it without one"
            ]
        )
    return key.encode()[: blake2b.MAX_KEY_SIZE]


@cache
def checkpoint_key() -> bytes:
    """The same in every start with the same `TASKD_TOKEN`; empty without one."""
    return load(WorkerSettings).checkpoint_key.encode()[: blake2b.MAX_KEY_SIZE]
