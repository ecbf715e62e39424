"""Text of a record, compressed for a store with small values: etcd, or a ConfigMap.

Other programs can write into these stores. A few bytes can unpack to gigabytes, so there is a
limit.
"""

from __future__ import annotations

import zlib

LIMIT_BYTES = 64 << 20
"""Of the unpacked text; the state of the largest job has a few megabytes."""

LEVEL = 1
"""A decision waits for it, and the default level takes much longer for a few percent."""


def pack(text: str) -> bytes:
    return zlib.compress(text.encode(), LEVEL)


def unpack(packed: bytes) -> str:
    """Raises ValueError or zlib.error if it is not complete, or too large."""
    engine = zlib.decompressobj()
    raw = engine.decompress(packed, LIMIT_BYTES)
    if not engine.eof:
        raise ValueError(f"it is cut off, or has more than {LIMIT_BYTES} bytes when unpacked")
    return raw.decode()
