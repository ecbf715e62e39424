"""Times on a CUDA device: events in the streams, read later, never waited for.

The host runs ahead of the device, so its clock does not tell when a collective ran. One event
before it and one after it do; a third, whose host time is known, relates the two clocks. The
recorder's thread asks now and then which events have passed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from taskd.runtime.clock import monotonic_ns
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.records import COMMUNICATION, DEFAULT, DEVICE, Span

NS_PER_MS = 1_000_000


class Anchor:
    """An event, and the host's time when it had just passed. Used by the recorder's thread."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._event: Any = None
        self._ns = 0

    def ns(self, event: Any) -> int:
        """The host's monotonic time of an event that has passed."""
        if self._event is None:
            # On a separate empty stream: this does not wait for any work of training.
            fresh: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = monotonic_ns()
            with torch.cuda.device(self.device):
                fresh.record(self._stream)
                fresh.synchronize()
            self._ns = (before + monotonic_ns()) // 2
            self._event = fresh
        return self._ns + int(self._event.elapsed_time(event) * NS_PER_MS)


@dataclass(slots=True)
class _Begun:
    event: Any
    stream: int


@dataclass(slots=True)
class _Collective:
    devices: Devices
    begun: _Begun
    ended: Any
    name: str
    thread: int
    recorded: bool

    def finished(self) -> Span | None:
        if not self.ended.query():
            return None
        anchor, turn = self.devices.anchor, self.devices.recorder.timer.current
        start, end = anchor.ns(self.begun.event), anchor.ns(self.ended)
        turn.collectives += 1
        turn.launch(start)
        turn.end(end)
        return self.devices.span(COMMUNICATION, self.name, start, end, self)


@dataclass(slots=True)
class _Step:
    devices: Devices
    event: Any
    name: str
    thread: int
    recorded: bool
    begun: _Begun

    def finished(self) -> Span | None:
        if not self.event.query():
            return None
        devices = self.devices
        now, began = devices.anchor.ns(self.event), devices.stepped_ns
        devices.stepped_ns = now
        devices.recorder.timer.step_ended(now)
        return devices.span(DEFAULT, self.name, began or now, now, self)


class Devices:
    """Times of the one device that this rank uses."""

    def __init__(self, recorder: Recorder, offset: int) -> None:
        self.recorder, self._offset = recorder, offset
        self.device = torch.cuda.current_device()
        self.anchor = Anchor(self.device)
        self.stepped_ns = 0

    def begin(self) -> _Begun | None:
        """Before a collective. None while a CUDA graph is captured: nothing is timed there."""
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return _Begun(event, stream.stream_id)

    def end(self, begun: _Begun, work: Any, name: str, recorded: bool) -> None:
        """After it. A done-callback of a device's future runs at once, on a stream that waits."""
        thread = threading.get_native_id()

        def done(_: Any) -> None:
            ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record(torch.cuda.current_stream(self.device))
            self.recorder.add_pending(_Collective(self, begun, ended, name, thread, recorded))

        work.get_future().add_done_callback(done)

    def step_ended(self, name: str, recorded: bool) -> None:
        begun = self.begin()
        if begun is not None:
            thread = threading.get_native_id()
            self.recorder.add_pending(_Step(self, begun.event, name, thread, recorded, begun))

    def span(self, domain: str, name: str, start: int, end: int, of: _Collective | _Step) -> Span:
        recorder, offset = self.recorder, self._offset
        return Span(
            domain,
            name,
            start + offset,
            end + offset,
            recorder.next_id(),
            of.thread,
            DEVICE,
            self.device,
            of.begun.stream,
        )
