"""Where the workers' output goes: to the console with a prefix, to files, or both.

One thread reads the pipes of all workers of the node and writes whole lines, so that the lines of
different ranks do not mix. A blocked console blocks only the workers that write. The thread keeps
the last lines of each rank: they are part of the report when the rank dies.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

CHUNK = 64 * 1024
TAIL_LINES = 40
PARTIAL_LINE_S = 0.2
"""A prompt or an incomplete line is shown after this long, even without its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sink:
    """Where one stream of one worker goes."""

    prefix: bytes
    console: int | None
    """The file descriptor that gets the lines with the prefix; None: they are not shown."""
    path: str = ""
    """A file that gets the lines without the prefix."""
    collect: str = ""
    """A file that gets the lines that contain one of `words`."""
    words: tuple[bytes, ...] = ()


@dataclass
class _Stream:
    source: int
    sink: Sink
    tail: deque[bytes]
    file: BinaryIO | None = None
    partial: bytes = b""
    done: threading.Event = field(default_factory=threading.Event)


class WorkerOutput:
    """Opens a pipe for each stream of a worker; the caller closes it when the worker is dead."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._opened: list[_Stream] = []
        self._closing: list[_Stream] = []
        self._streams: dict[object, list[_Stream]] = {}
        self._closed_consoles: set[int] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._pump, name="taskd-output", daemon=True)
        self._thread.start()

    def open(self, owner: object, sinks: tuple[Sink, ...]) -> list[int]:
        """The write ends for the worker's streams; the caller closes them after its start."""
        streams = self._streams.setdefault(owner, [])
        tail = streams[0].tail if streams else deque[bytes](maxlen=TAIL_LINES)
        ends = []
        for sink in sinks:
            read, write = os.pipe()
            os.set_blocking(read, False)
            stream = _Stream(read, sink, tail)
            stream.file = self._file(sink)
            streams.append(stream)
            with self._lock:
                self._opened.append(stream)
            ends.append(write)
        self._wake()
        return ends

    def close(self, owner: object, timeout_s: float = 5.0) -> str:
        """Write what is left in the dead worker's pipes; returns its last lines."""
        streams = self._streams.pop(owner, [])
        with self._lock:
            self._closing.extend(streams)
        self._wake()
        for stream in streams:
            stream.done.wait(timeout_s)
        return b"\n".join(streams[0].tail).decode(errors="replace") if streams else ""

    def stop(self, timeout_s: float = 5.0) -> None:
        for owner in list(self._streams):
            self.close(owner, timeout_s)
        self._stopping = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        os.write(self._wakeup_write, b"!")

    def _pump(self) -> None:
        while not self._stopping:
            waiting = [key.data for key in self._selector.get_map().values() if key.data]
            partial = any(stream.partial for stream in waiting)
            ready = self._selector.select(PARTIAL_LINE_S if partial else None)
            for key, _ in ready:
                if key.data is None:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup_read, CHUNK)
                else:
                    self._read(key.data)
            if not ready:
                for stream in waiting:
                    self._flush(stream)
            self._apply_changes()

    def _apply_changes(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, []
            closing, self._closing = self._closing, []
        for stream in opened:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        for stream in closing:
            while not stream.done.is_set() and self._read(stream):
                pass
            self._end(stream)

    def _read(self, stream: _Stream) -> bool:
        """False when there is nothing to read now."""
        try:
            chunk = os.read(stream.source, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._end(stream)
            return False
        lines = (stream.partial + chunk).splitlines(keepends=True)
        # An incomplete last line waits for its end; a bare \r may be the first half of \r\n.
        stream.partial = b"" if lines[-1].endswith(b"\n") else lines.pop()
        self._emit(stream, lines)
        if len(stream.partial) > CHUNK:
            self._flush(stream)
        return True

    def _flush(self, stream: _Stream) -> None:
        if stream.partial:
            lines, stream.partial = [stream.partial], b""
            self._emit(stream, lines)

    def _emit(self, stream: _Stream, lines: list[bytes]) -> None:
        sink = stream.sink
        stream.tail.extend(stripped for line in lines if (stripped := line.rstrip(b"\r\n")))
        if sink.console is not None:
            self._show(sink.console, b"".join(sink.prefix + line for line in lines))
        if stream.file is not None:
            try:
                stream.file.write(b"".join(lines))
            except OSError as error:
                self._abandon_file(stream, error)
        if sink.words and any(word in line for line in lines for word in sink.words):
            matching = [line for line in lines if any(word in line for word in sink.words)]
            with suppress(OSError), open(sink.collect, "ab") as file:
                file.write(b"".join(matching))

    def _show(self, console: int, text: bytes) -> None:
        if console in self._closed_consoles:
            return
        view = memoryview(text)
        while view:
            try:
                view = view[os.write(console, view) :]
            except OSError:  # the console is closed, which must not stop training
                self._closed_consoles.add(console)
                return

    def _file(self, sink: Sink) -> BinaryIO | None:
        if not sink.path:
            return None
        return open(sink.path, "ab", buffering=0)

    def _abandon_file(self, stream: _Stream, error: OSError) -> None:
        assert stream.file is not None
        stream.file.close()
        stream.file = None
        text = (
            f"taskd: {stream.sink.path}: {error.strerror}. No more lines are written to this file; "
            "training continues.\n"
        )
        self._show(2, text.encode())

    def _end(self, stream: _Stream) -> None:
        if stream.done.is_set():
            return
        self._flush(stream)
        with suppress(KeyError):
            self._selector.unregister(stream.source)
        os.close(stream.source)
        if stream.file is not None:
            stream.file.close()
        stream.done.set()
