"""Handles of collectives in flight. `resilient_group.py` makes them; DDP, FSDP and scripts wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from taskd.torch import compat
from taskd.torch.groups import foreign_threads

if TYPE_CHECKING:
    from taskd.torch.groups.all_groups import Groups

NO_TIMEOUT = timedelta(0)
"""How c10d spells "as long as the group's own timeout"."""

Fallback = Callable[[], list[torch.Tensor]]
"""Puts plausible values where the failed collective left torn ones, and returns its outputs."""


class _SilentWork(dist.Work):
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


class Finished(_SilentWork):
    """A collective that is complete from the start, since no other rank takes part."""

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


class GlooWork(_SilentWork):
    """A collective over gloo inside a protected step: it always ends and never raises.

    Callers wait for a future of ours, not for gloo: a gloo that has lost a connection in the middle
    of a message does not wake the thread that waits for it. `abandon` ends the wait at once; errors
    go to `Groups`, which the optimizer's gate asks before any of the results is used.
    """

    def __init__(self, groups: Groups, inner: dist.Work, fallback: Fallback) -> None:
        super().__init__()
        self._groups, self._inner, self._fallback = groups, inner, fallback
        self._future: Future[Any] = Future()
        self._to_finish = [self._future]
        """Empty from the end on. Taking the item out is atomic: two threads may end the wait."""
        groups.gloo_started(self)
        try:
            inner.get_future().add_done_callback(self._on_done)
        except RuntimeError:  # point-to-point works have no future
            threading.Thread(target=self._wait_inner, name="taskd-work", daemon=True).start()
        if groups.is_broken():
            self.abandon()  # broken since the call began: nothing else would end this wait

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
        return 0 if self._groups.is_broken() else compat.source_rank(self._inner)

    def abandon(self) -> None:
        """Free the waiting thread. gloo may still use the memory: see `GlooCollectives.wait`."""
        self._finish(None)

    def _on_done(self, future: Future[Any]) -> None:
        foreign_threads.keep_state()
        try:
            outputs = future.value()
        except RuntimeError as error:
            self._on_error(error)
            outputs = None
        self._groups.gloo_ended(self)
        self._finish(outputs)

    def _wait_inner(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self._on_error(error)
        self._groups.gloo_ended(self)
        self._finish([])

    def _on_error(self, error: RuntimeError) -> None:
        """An abandoned collective fails late and says nothing about the current groups."""
        if self._to_finish:
            self._groups.lost = True
            self._groups.absorb(error)

    def _finish(self, outputs: list[torch.Tensor] | None) -> None:
        try:
            future = self._to_finish.pop()
        except IndexError:
            return
        if outputs is None:
            self._groups.lost = True
            outputs = self._fallback()
        future.set_result(outputs)


class DeviceWork(_SilentWork):
    """The same over NCCL and similar libraries, which wait on the device and abort natively.

    The host passes `wait` long before the device is done: the gate waits for the device
    (`Groups.wait_for_devices`) before any of the results is used.
    """

    def __init__(self, groups: Groups, inner: dist.Work, fallback: Fallback) -> None:
        super().__init__()
        self._groups, self._inner, self._fallback = groups, inner, fallback
        self._rendezvous = groups.rendezvous
        groups.device_started(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            self._inner.wait(timeout)
        except RuntimeError as error:
            self._groups.absorb(error, self._rendezvous)
            self._groups.lost = True
            self._fallback()
        return True

    def get_future(self) -> Future[Any]:
        """The library's own, which torch reads without Python: `then` would cost 0.2 ms.

        If it failed, it would raise in the script's backward pass, inside the step.
        """
        future = self._inner.get_future()
        future.add_done_callback(self._note_error)
        return future

    def _note_error(self, future: Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self._groups.absorb(error, self._rendezvous)

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()


class OutsideWork(dist.Work):
    """A collective outside any step or section, as it is: it can raise."""

    def __init__(self, groups: Groups, inner: dist.Work) -> None:
        super().__init__()
        self._groups, self._inner = groups, inner

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            return self._inner.wait(timeout)
        except RuntimeError:
            self._groups.explain_failure_outside()
            raise

    def get_future(self) -> Future[Any]:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def _source_rank(self) -> int:
        return compat.source_rank(self._inner)
