"""Handles of collectives in flight. `group.py` makes them, DDP, FSDP and user code wait on them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

if TYPE_CHECKING:
    from taskd.torch.groups import Groups

NO_TIMEOUT = timedelta(0)
"""How c10d spells "as long as the group's own timeout"."""


Spoilt = Callable[[], list[torch.Tensor]]
"""Puts plausible values where the failed collective left torn ones, and returns its outputs."""


class Guarded(dist.Work):
    """A collective inside a protected step: it ends, well or not, and never raises.

    The error goes to `Groups`, which the optimizer's gate asks before any garbage is used.
    """

    def __init__(self, groups: Groups, inner: dist.Work, spoilt: Spoilt) -> None:
        super().__init__()
        self._groups, self._inner, self._spoilt = groups, inner, spoilt
        self._counted = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            self._inner.wait(timeout)
        except RuntimeError as error:
            self._groups.absorb(error)
            self._spoilt()
        self._done()
        return True

    def get_future(self) -> Future[Any]:
        return self._inner.get_future().then(self._settled)

    def _settled(self, future: Future[Any]) -> list[torch.Tensor]:
        try:
            outputs: list[torch.Tensor] = future.value()
        except RuntimeError as error:
            self._groups.absorb(error)
            outputs = self._spoilt()
        self._done()
        return outputs

    def _done(self) -> None:
        if not self._counted:
            self._counted = True
            self._groups.count_done()

    # The trampoline to C++ knows `wait` and `get_future` only; these are for Python callers.

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()


class Finished(dist.Work):
    """A collective that is over before it began, since nobody else takes part."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return 0

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None
