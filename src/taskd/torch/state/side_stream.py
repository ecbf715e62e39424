"""Work on tensors beside the training: on a device, in a stream of its own.

A copy of the state must not wait for the kernels of the next step, nor they for it. `state.py`
makes one where a parcel is made, in the training thread, and works in it from whatever thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Side:
    """What is done in it comes after all that was asked of the devices when it was made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams = [_beside(one) for one in {t.device for t in tensors if t.is_cuda}]

    @property
    def is_needed(self) -> bool:
        """Whether there is a device at all."""
        return bool(self._streams)

    @contextmanager
    def work(self) -> Iterator[None]:
        """When it is left, all of it is done."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams:
                stream.synchronize()


def _beside(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
