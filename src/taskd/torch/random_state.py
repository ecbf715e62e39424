"""Random numbers belong to the step: when a step is replayed, it draws the same ones.

Each generator (torch on CPU and GPU, Python, NumPy) is seeded when a step begins, from the script's
own seed and the number of the step. So nothing has to be saved, moved or restored: a replacement
that ran the same script has the same seeds as its predecessor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class BaseSeeds:
    """A hash of the state of each generator, as the script has left it."""

    torch: bytes
    cuda: bytes
    python: bytes
    numpy: bytes


def capture() -> BaseSeeds:
    """From the current state of the generators."""
    cuda = b""
    if _uses_cuda():
        cuda = torch.cuda.get_rng_state().numpy().tobytes()
    return BaseSeeds(
        torch=_hash(torch.get_rng_state().numpy().tobytes()),
        cuda=_hash(cuda),
        python=_hash(repr(random.getstate()).encode()),
        numpy=_hash(np.random.get_state(legacy=True)[1].tobytes()),  # type: ignore[index]
    )


def seed_step(base: BaseSeeds, step: int) -> None:
    """Seed every generator for this step."""
    number = step.to_bytes(8, "little")
    seed: Callable[[bytes], int] = lambda key: int.from_bytes(  # noqa: E731
        blake2b(number, key=key, digest_size=8).digest(), "little"
    )
    torch.default_generator.manual_seed(seed(base.torch) >> 1)
    if _uses_cuda():
        torch.cuda.manual_seed_all(seed(base.cuda) >> 1)
    random.seed(seed(base.python))
    np.random.seed(seed(base.numpy) & 0xFFFFFFFF)


def _uses_cuda() -> bool:
    """Whether a GPU is in use: asking one that is not would create its context."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def _hash(state: bytes) -> bytes:
    return blake2b(state, digest_size=8).digest()
