"""Encrypts the bytes of one connection between two ranks (`taskd run --encrypt-state`).

AES-256 in GCM mode, in records of at most one MiB, each with its length, its place in the order and
its tag. Each connection has a key of its own, which is derived from the job's key and from random
numbers of both ends. The extra `taskd[secure]` has the cipher.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from taskd.errors import SettingsError
from taskd.torch.state.sealed import BadState

RECORD = 1 << 20
SMALL = 1 << 16
"""Pieces below this size wait for the next ones, until there are enough for a record."""
TAG = 16
_LENGTH = 4
_BLOCK = 16

Send = Callable[[memoryview], None]
Receive = Callable[[memoryview], None]


def check_available() -> None:
    """Raise SettingsError if state cannot be encrypted here."""
    if importlib.util.find_spec("cryptography") is None:
        raise SettingsError(
            [
                "--encrypt-state needs the library `cryptography`, which is not installed: "
                "pip install 'taskd[secure]', on every node"
            ]
        )


class Encrypter:
    """Sends what it is given, encrypted. `flush` sends what is left."""

    def __init__(self, key: bytes, send: Send) -> None:
        self._key, self._send = key, send
        self._number = 0
        self._waiting = bytearray()
        self._space = bytearray(RECORD + _BLOCK)

    def send(self, data: memoryview) -> None:
        data = data.cast("B")
        if data.nbytes < SMALL:
            self._waiting += data
            if len(self._waiting) >= SMALL:
                self.flush()
            return
        self.flush()
        for at in range(0, data.nbytes, RECORD):
            self._send_record(data[at : at + RECORD])

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if waiting:
            self._send_record(memoryview(waiting))

    def _send_record(self, data: memoryview) -> None:
        head = data.nbytes.to_bytes(_LENGTH, "little")
        cipher = _cipher(self._key, self._number, None).encryptor()
        self._number += 1
        cipher.authenticate_additional_data(head)
        length = cipher.update_into(data, self._space)
        cipher.finalize()
        self._send(memoryview(head + cipher.tag))
        self._send(memoryview(self._space)[:length])


class Decrypter:
    """Receives and verifies what an `Encrypter` has sent."""

    def __init__(self, key: bytes, receive: Receive) -> None:
        self._key, self._receive = key, receive
        self._number = 0
        self._record = bytearray(RECORD)
        self._plain = bytearray(RECORD + _BLOCK)
        self._left = memoryview(b"")
        """What has been decrypted and not been asked for yet."""

    def receive(self, target: memoryview) -> None:
        """Fill the whole target."""
        target = target.cast("B")
        while target.nbytes:
            if not self._left.nbytes:
                self._read_record()
            size = min(target.nbytes, self._left.nbytes)
            target[:size] = self._left[:size]
            target, self._left = target[size:], self._left[size:]

    def _read_record(self) -> None:
        from cryptography.exceptions import InvalidTag

        head = bytearray(_LENGTH + TAG)
        self._receive(memoryview(head))
        length = int.from_bytes(head[:_LENGTH], "little")
        if not 0 < length <= RECORD:
            raise BadState(f"invalid record of encrypted state: length={length}")
        record = memoryview(self._record)[:length]
        self._receive(record)
        cipher = _cipher(self._key, self._number, bytes(head[_LENGTH:])).decryptor()
        self._number += 1
        cipher.authenticate_additional_data(bytes(head[:_LENGTH]))
        cipher.update_into(record, self._plain)
        try:
            cipher.finalize()
        except InvalidTag:
            raise BadState(
                "encrypted state was changed on its way, or comes from another job or incident"
            ) from None
        self._left = memoryview(self._plain)[:length]


def _cipher(key: bytes, number: int, tag: bytes | None) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(AES(key), GCM(number.to_bytes(12, "little"), tag))
