"""The gate before the update, on a device: the device waits, and the host goes on.

A collective on a device may fail long after the host has queued it. If the host waited for it
before the update, the device would be idle while the host queues the update and the next
forward pass. So the wait is queued, too: the device waits on the training stream for a number in
host memory, behind everything that the step has exchanged and before the first kernel of the
update. The step writes that number at its end, when it knows that all sums are complete; a thread
does it for a script that reads a result from the device before.

If a collective has failed, what is queued behind the gate cannot be taken back. Then the weights
and the state of the optimizer, which are still those of the step before, are copied aside first,
the device runs on, and they are copied back. It costs memory and time only in that case.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch
from torch.optim import Optimizer

from taskd.torch.state.protected import Protected

log = logging.getLogger(__name__)

WAIT_UNTIL_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: it counts round past 2^32."""
OPTIMIZERS = "torch.optim."
"""Their updates change weights and state on the current stream, and nothing else."""


class Hold:
    """One passage through the gate: queued, and decided once, by whichever thread is first."""

    def __init__(self, protected: Protected, is_complete: Callable[[], bool]) -> None:
        """`is_complete` tells whether the collectives, which have ended, have succeeded."""
        self.is_complete = False
        self._protected, self._ask = protected, is_complete
        self._lock = threading.Lock()
        self._is_decided = False
        state = protected.optimizers[0].state
        self._states = {weight: dict(values) for weight, values in state.items()}
        self._here = [one for one in self._tensors() if not one.is_cuda]
        """The update changes these at once: they are not work of the device."""
        self._here_before = [one.clone() for one in self._here]
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reached_asleep = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._reached.record()
        self._reached_asleep.record()

    def decide(self, release: Callable[[], None], asleep: bool = False) -> None:
        """Wait for the device to come here, find out whether all sums are complete, let it go on.

        `asleep`: without using the processor meanwhile.
        """
        (self._reached_asleep if asleep else self._reached).synchronize()
        with self._lock:
            if self._is_decided:
                return
            try:
                self.is_complete = self._ask()
                if not self.is_complete:
                    self._copy_aside()
            except (RuntimeError, MemoryError) as error:
                log.warning("the weights could not be saved and are lost on this rank: %s", error)
            finally:
                self._is_decided = True
                release()

    def restore(self) -> bool:
        """Bring weights and optimizer back to what they were at the gate. False: they are lost."""
        torch.cuda.current_stream().synchronize()
        if self._aside is None:
            return False
        with torch.no_grad():
            for tensor, before in self._aside:
                tensor.copy_(before)
            for tensor, before in zip(self._here, self._here_before, strict=True):
                tensor.copy_(before)
        state = self._protected.optimizers[0].state
        for weight in list(state):
            if weight in self._states:
                state[weight] = self._states[weight]
            else:
                del state[weight]
        return True

    def _tensors(self) -> list[torch.Tensor]:
        values = [value for state in self._states.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _copy_aside(self) -> None:
        """To the host: the device may have no memory left. On a stream that waits for nothing."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(stream):
            on_device = [*self._protected.parameters, *self._tensors()]
            aside = [(one.data, one.detach().cpu()) for one in on_device if one.is_cuda]
        stream.synchronize()
        self._aside = aside


class DeviceGate:
    """Queues the waits of one process."""

    def __init__(self, protected: Protected, driver: ctypes.CDLL) -> None:
        self._protected, self._driver = protected, driver
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._opened = ctypes.c_uint32.from_address(self._memory.data_ptr())
        self._number = 0
        self._pending: Hold | None = None
        self._queue: SimpleQueue[tuple[Hold, int]] = SimpleQueue()
        threading.Thread(target=self._watch, name="taskd-gate", daemon=True).start()

    def hold(self, is_complete: Callable[[], bool]) -> bool:
        """The device does nothing of what is queued from here on before `is_complete` was asked.

        False: this device cannot wait for the host.
        """
        self._number = (self._number + 1) & 0xFFFFFFFF
        hold = Hold(self._protected, is_complete)
        code = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.c_uint64(self._memory.data_ptr()),
            ctypes.c_uint32(self._number),
            WAIT_UNTIL_AT_LEAST,
        )
        if code:
            log.info("the device cannot wait for the host: the host waits: error=%d", code)
            return False
        self._pending = hold
        self._queue.put((hold, self._number))
        return True

    def settle(self) -> Hold | None:
        """The step ends: wait until the device has passed. None: it was not held."""
        hold, self._pending = self._pending, None
        if hold is not None:
            hold.decide(partial(self._release, self._number))
        return hold

    def _release(self, number: int) -> None:
        self._opened.value = number

    def _watch(self) -> None:
        """For a script that waits for the device inside the step: it cannot come to its end."""
        while True:
            hold, number = self._queue.get()
            hold.decide(partial(self._release, number), asleep=True)


def open_gate(protected: Protected) -> DeviceGate | None:
    """None: the host has to wait, because the device or the optimizer is of another kind."""
    on_device = all(one.device.type == "cuda" for one in protected.parameters)
    if not (on_device and torch.cuda.is_available()) or torch.version.hip is not None:
        return None
    is_known = all(map(_is_known, protected.optimizers))
    if len(protected.optimizers) != 1 or protected.scalers or not is_known:
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    return DeviceGate(protected, driver) if hasattr(driver, "cuStreamWaitValue32_v2") else None


def _is_known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith(OPTIMIZERS)
