"""Handles of collectives in flight. `group.py` makes them, DDP, FSDP and user code wait on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

if TYPE_CHECKING:
    from taskd.torch.groups.all_groups import Groups

NO_TIMEOUT = timedelta(0)
"""How c10d spells "as long as the group's own timeout"."""

Spoilt = Callable[[], list[torch.Tensor]]
"""Puts plausible values where the failed collective left torn ones, and returns its outputs."""


class _Quiet(dist.Work):
    """A handle that never raises. The trampoline to C++ knows `wait` and `get_future` only; the
    other methods are for Python callers."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def _source_rank(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class Finished(_Quiet):
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

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class Guarded(_Quiet):
    """A collective over gloo inside a protected step: it ends, well or not, and never raises.

    Whoever waits, waits for a future of ours, not for gloo: a gloo that has lost a connection in
    the middle of a message forgets to wake the thread that waits for it. `give_up` ends the wait at
    once; errors go to `Groups`, which the optimizer's gate asks before any garbage is used.
    """

    def __init__(self, groups: Groups, inner: dist.Work, spoilt: Spoilt) -> None:
        super().__init__()
        self._groups, self._inner, self._spoilt = groups, inner, spoilt
        self._future: Future[Any] = Future()
        self._once = threading.Lock()
        self._over = False
        groups.begin(self)
        try:
            inner.get_future().add_done_callback(self._ended)
        except RuntimeError:  # point-to-point works have no future
            threading.Thread(target=self._watch, name="taskd-work", daemon=True).start()
        if groups.trouble():
            self.give_up()  # broken since the call began: nobody else would end this wait

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def is_completed(self) -> bool:
        return self._future.done()

    def _source_rank(self) -> int:
        return 0 if self._groups.trouble() else self._inner._source_rank()

    def give_up(self) -> None:
        """Let whoever waits go on. gloo may still hold the memory: see `Groups.settle`."""
        self._finish(None)

    def _ended(self, future: Future[Any]) -> None:
        try:
            outputs = future.value()
        except RuntimeError as error:
            self._failed(error)
            outputs = None
        self._groups.end(self)
        self._finish(outputs)

    def _watch(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self._failed(error)
        self._groups.end(self)
        self._finish([])

    def _failed(self, error: RuntimeError) -> None:
        """What has been given up fails late, and says nothing about the groups of today."""
        if not self._over:
            self._groups.absorb(error)

    def _finish(self, outputs: list[torch.Tensor] | None) -> None:
        with self._once:
            if self._over:
                return
            self._over = True
        self._future.set_result(self._spoilt() if outputs is None else outputs)


class Streamed(_Quiet):
    """The same over NCCL and its like, which wait on the device and can be aborted natively.

    Whoever waits on the host is past it long before the device is: the gate waits for the device
    (`Groups.land`) before any garbage is used.
    """

    def __init__(self, groups: Groups, inner: dist.Work, spoilt: Spoilt) -> None:
        super().__init__()
        self._groups, self._inner, self._spoilt = groups, inner, spoilt
        self._met = groups.meeting
        groups.launch(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            self._inner.wait(timeout)
        except RuntimeError as error:
            self._groups.absorb(error, self._met)
            self._spoilt()
        return True

    def get_future(self) -> Future[Any]:
        return self._inner.get_future().then(self._settled)

    def _settled(self, future: Future[Any]) -> list[torch.Tensor]:
        try:
            outputs: list[torch.Tensor] = future.value()
        except RuntimeError as error:
            self._groups.absorb(error, self._met)
            outputs = self._spoilt()
        return outputs

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()
