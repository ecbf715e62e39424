"""A keyed digest of tensors, computed where they are: almost as fast as memory, hard to forge.

BLAKE2b over a whole state would cost more than its transfer. So there are two levels:

1. Each row of 64-bit words is multiplied with secret numbers and added up, modulo 2**64; the upper
   halves of the words again, with other numbers, because a product loses upper bits. Other bytes
   with the same sums exist, but who does not know the numbers finds them with a probability of at
   most 2**-33 per attempt, and each failed attempt is noticed.
2. The keyed BLAKE2b digest of all sums. Only that one is published, so that nothing about the
   secret numbers can be learned from it.

The numbers are derived from the job's key. `transfer.py` puts the digests into its manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b, shake_256

import numpy as np
import torch

DIGEST = 16
WORD = 8
ROW = 1 << 14
"""In words, and so many secret numbers there are, twice."""
BLOCK_ROWS = 8
"""How many rows are read at once: on a processor, they stay in its cache."""
DEVICE_BLOCK_ROWS = 128
"""The same on another device, where each operation takes longer to start."""
SMALL = 1 << 15
"""A tensor of at most so many bytes is not worth the first level."""


def digests(tensors: Sequence[torch.Tensor], key: bytes) -> tuple[bytes, ...]:
    """One for each tensor of bytes. Each device is waited for once, not once per tensor."""
    condensed = _fetched([_condensed(one, key) for one in tensors])
    return tuple(
        _finished(content, data.numel(), key)
        for content, data in zip(condensed, tensors, strict=True)
    )


def digest(data: torch.Tensor, key: bytes) -> bytes:
    return digests([data], key)[0]


def _finished(condensed: bytes, length: int, key: bytes) -> bytes:
    made = blake2b(digest_size=DIGEST, key=key, person=b"taskd state")
    made.update(length.to_bytes(WORD, "little"))
    made.update(condensed)
    return made.digest()


@torch.no_grad()
def _condensed(data: torch.Tensor, key: bytes) -> torch.Tensor:
    """The bytes that the second level reads, on the device of the data."""
    if data.numel() <= SMALL:
        return data
    if data.data_ptr() % WORD:
        data = data.clone()
    low, high = _numbers(key, data.device)
    whole = data.numel() // WORD
    words, rest = data[: whole * WORD].view(torch.int64), data[whole * WORD :]
    rows = whole // ROW
    row_sums = _host_row_sums if data.device.type == "cpu" else _device_row_sums
    parts = [row_sums(words[: rows * ROW].view(rows, ROW), low, high)]
    if last := whole - rows * ROW:
        parts.append(row_sums(words[rows * ROW :].view(1, last), low[:last], high[:last]))
    return torch.cat([*(one.view(torch.uint8).view(-1) for one in parts), rest])


def _host_row_sums(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """In one thread: torch's threads would wait for each other, and for those of the transfer."""
    sums = torch.empty((2, len(rows)), dtype=torch.int64)
    space = torch.empty((min(len(rows), BLOCK_ROWS), rows.shape[1]), dtype=torch.int64)
    for at in range(0, len(rows), BLOCK_ROWS):
        block = rows[at : at + BLOCK_ROWS]
        upper = space[: len(block)]
        np.right_shift(block.numpy(), 32, out=upper.numpy())
        torch.mv(block, low, out=sums[0, at : at + BLOCK_ROWS])
        torch.mv(upper, high, out=sums[1, at : at + BLOCK_ROWS])
    return sums


def _device_row_sums(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """In blocks, too: the device may have little memory left."""
    blocks = torch.split(rows, DEVICE_BLOCK_ROWS)
    lower = [(block * low).sum(1) for block in blocks]
    upper = [((block >> 32) * high).sum(1) for block in blocks]
    return torch.stack([torch.cat(lower), torch.cat(upper)])


@cache
def _numbers(key: bytes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    stream = bytearray(shake_256(b"numbers of the keyed digest" + key).digest(2 * ROW * WORD))
    both = torch.frombuffer(stream, dtype=torch.int64).to(device)
    return both[:ROW], both[ROW:]


def _fetched(parts: list[torch.Tensor]) -> list[bytes]:
    """Their contents in host memory, with one copy per device."""
    contents = [b""] * len(parts)
    for device in {one.device for one in parts}:
        here = [index for index, one in enumerate(parts) if one.device == device]
        if device.type == "cpu":
            for index in here:
                contents[index] = parts[index].numpy().tobytes()
            continue
        together = torch.cat([parts[index] for index in here]).cpu().numpy().tobytes()
        at = 0
        for index in here:
            contents[index] = together[at : (at := at + parts[index].numel())]
    return contents
