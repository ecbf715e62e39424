"""Random numbers belong to the step: when a step is replayed, it draws the same ones.

Each generator (torch on CPU and GPU, Python, NumPy) is seeded when a step begins, from the script's
own seed and the number of the step. So nothing has to be restored after a step. A replacement takes
the seeds that its predecessor has left in the node's shared memory. On another node it has the same
ones if the script has drawn the same numbers there before `protect`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

BEFORE, ATTEMPT, AFTER = range(3)
"""The code before the attempts at a step, an attempt, the code after them: each draws numbers of
its own. `with step:` belongs to the first."""


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


@dataclass(frozen=True, slots=True)
class Generators:
    """The complete state of each generator."""

    torch: bytes
    cuda: bytes
    python: Any
    numpy: Any


def read() -> Generators:
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if _uses_cuda() else b""
    state = torch.get_rng_state().numpy().tobytes()
    return Generators(state, cuda, random.getstate(), np.random.get_state(legacy=True))


@contextmanager
def borrowed(state: Generators) -> Iterator[None]:
    """Draw the random numbers of this state, which another rank has sent."""
    own = read()
    _set(state)
    try:
        yield
    finally:
        _set(own)


def _set(state: Generators) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    if state.cuda and _uses_cuda():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.cuda), dtype=torch.uint8))
    random.setstate(state.python)
    np.random.set_state(state.numpy)


def seed_step(base: BaseSeeds, step: int, phase: int = BEFORE) -> None:
    """Seed every generator for this phase of the step."""
    number = step.to_bytes(8, "little") + phase.to_bytes(8, "little")
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
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _hash(state: bytes) -> bytes:
    return blake2b(state, digest_size=8).digest()
