"""Random numbers belong to the step: replayed or replaced, a step draws the same ones.

Each generator (torch on CPU and GPU, Python, NumPy) is seeded anew when a step begins, from what
the script had seeded it with and the number of the step. So nothing has to be saved, moved or
restored: a replacement that ran the same script knows all that its predecessor knew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Roots:
    """What each generator of one rank was seeded with, condensed."""

    torch: bytes
    cuda: bytes
    python: bytes
    numpy: bytes


def roots() -> Roots:
    """As the script has left its generators."""
    cuda = b""
    if _has_cuda():
        cuda = torch.cuda.get_rng_state().numpy().tobytes()
    return Roots(
        torch=_condense(torch.get_rng_state().numpy().tobytes()),
        cuda=_condense(cuda),
        python=_condense(repr(random.getstate()).encode()),
        numpy=_condense(np.random.get_state(legacy=True)[1].tobytes()),  # type: ignore[index]
    )


def begin(origin: Roots, step: int) -> None:
    """Seed every generator for this step."""
    number = step.to_bytes(8, "little")
    seed: Callable[[bytes], int] = lambda root: int.from_bytes(  # noqa: E731
        blake2b(number, key=root, digest_size=8).digest(), "little"
    )
    torch.default_generator.manual_seed(seed(origin.torch) >> 1)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed(origin.cuda) >> 1)
    random.seed(seed(origin.python))
    np.random.seed(seed(origin.numpy) & 0xFFFFFFFF)


def _has_cuda() -> bool:
    """A GPU that is in use: asking one that is not would create its context."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def _condense(state: bytes) -> bytes:
    return blake2b(state, digest_size=8).digest()
