"""The agent's end of the zygote: starts processes, sees them die, ends them.

A death is seen through the process's pidfd at once; the exit status follows from the zygote, its
parent. When the zygote itself dies the kernel kills the workers, and their deaths arrive here the
same way, only without a status.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from taskd.agent.zygote import protocol as letters
from taskd.agent.zygote.program import Program
from taskd.errors import Transient

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 1.0
"""How long the exit status may come after the death before we report the death without it."""

MOST_FAILURES = 3
"""Zygotes that die one after another before they are ready; then there is no point in another."""

_BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from taskd.agent.zygote.zygote import main; main()"
)


class ZygoteLost(Transient):
    """The zygote has died; a new one must be started before anything else can be."""


class StartRefused(Transient):
    """The system would not give us a process; says why."""


@dataclass(frozen=True, slots=True)
class Process:
    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Death:
    process: Process
    exit_code: int | None
    """None when a signal ended it, or when nobody could say."""
    signal: int | None


@dataclass
class _Child:
    process: Process
    pidfd: int
    on_death: Callable[[Death], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class _Understudy:
    process: Process
    pipe: socket.socket
    """Where it waits for its part."""


@dataclass
class Nursery:
    """One zygote and its children. All methods belong to the event loop's thread."""

    program: Program
    preload: tuple[str, ...] = ()
    spawn: bool = False
    remove: tuple[str, ...] = ()
    """Folders that the zygote removes when the agent and all workers are gone."""
    env: dict[str, str] | None = None
    """The environment that the zygote, and so every worker, starts with."""
    on_lost: Callable[[], None] = lambda: None
    """Called when zygotes die before they are ready, again and again."""

    _popen: subprocess.Popen[bytes] | None = None
    _pipe: socket.socket | None = None
    _ready: asyncio.Future[letters.Ready] | None = None
    _failures: int = 0
    _next_id: int = 0
    _starting: dict[int, tuple[asyncio.Future[Process], Callable[[Death], None]]] = field(
        default_factory=dict
    )
    _children: dict[int, _Child] = field(default_factory=dict)
    _understudy: _Understudy | None = None

    def open(self) -> None:
        """Start the zygote's process. Needs no event loop, so that it can come first of all."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", "-c", _BOOT, f"--fd={theirs.fileno()}"]
            command += [f"--kind={self.program.kind}", f"--preload={','.join(self.preload)}"]
            command += ["--spawn"] if self.spawn else []
            command += [f"--remove={folder}" for folder in self.remove]
            command += ["--", self.program.target, *self.program.arguments]
            self._popen = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=self.env,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        ours.setblocking(False)
        self._pipe = ours

    def watch(self) -> None:
        """From now on letters are read; call it once the event loop runs."""
        assert self._pipe is not None
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._pipe, self._read)

    @property
    def warm(self) -> bool:
        """The zygote has imported everything: a worker could be forked at once."""
        return self._ready is not None and self._ready.done() and not self._ready.exception()

    async def ready(self) -> letters.Ready:
        """Wait until the zygote has imported everything; raises ZygoteLost if it died over it."""
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def start(
        self,
        name: str,
        env: dict[str, str],
        stdout: int,
        stderr: int,
        on_death: Callable[[Death], None],
    ) -> Process:
        """A new worker: the understudy, or a fork. The two files stay the caller's to close."""
        files = stdout, stderr
        if (ready := self._cast(name, env, files, on_death)) is not None:
            return ready
        return await self._ask(letters.Start(self._new_id(), name, env), files, on_death)

    async def prepare(self, sibling: int = 0) -> None:
        """Have a process ready that becomes the next worker without being forked first.

        `sibling`: the pid of a worker that it will resemble.
        """
        if self.spawn or self._understudy is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await self._ask(
                    letters.Rehearse(self._new_id(), sibling),
                    (theirs.fileno(),),
                    self._understudy_died,
                )
            except (StartRefused, ZygoteLost) as error:
                ours.close()
                log.info("there is no understudy: %s", error)
                return
        ours.setblocking(False)
        self._dismiss()
        self._understudy = _Understudy(process, ours)

    async def serve_store(
        self,
        host: str,
        port: int,
        listener: int,
        renewed: bool,
        on_death: Callable[[Death], None],
    ) -> Process:
        wanted = letters.ServeStore(self._new_id(), host, port, renewed)
        return await self._ask(wanted, (listener,), on_death)

    def send_signal(self, process: Process, signum: int) -> None:
        """To the one process, if it still lives."""
        child = self._children.get(process.id)
        if child is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signum)

    def kill(self, process: Process) -> None:
        """At once, with whatever it has started in its own process group."""
        if process.id in self._children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Who was born a moment ago has no group yet.
            self.send_signal(process, signal.SIGKILL)

    async def close(self) -> None:
        """End the zygote and with it every descendant; returns when they are gone, unreported."""
        self._dismiss()
        for child in list(self._children.values()):
            self._forget(child)
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            with suppress(BrokenPipeError, BlockingIOError):
                letters.write(self._pipe, letters.Leave())
            self._pipe.close()
            self._pipe = None
        if self._popen is not None:
            await asyncio.to_thread(self._popen.wait)
            self._popen = None

    def _cast(
        self,
        name: str,
        env: dict[str, str],
        files: tuple[int, ...],
        on_death: Callable[[Death], None],
    ) -> Process | None:
        """Give the understudy this part. None: there is none that is ready for it."""
        ready = self._understudy
        if ready is None:
            return None
        try:
            alive = letters.read(ready.pipe) is not None
            if alive:
                letters.write(ready.pipe, letters.Start(ready.process.id, name, env), files)
        except BlockingIOError:
            return None  # it still rehearses, and is there for the next one
        except BrokenPipeError:
            alive = False
        self._dismiss()
        if not alive:
            return None
        self._children[ready.process.id].on_death = on_death
        return ready.process

    def _dismiss(self) -> None:
        """Without a part it ends by itself."""
        if self._understudy is not None:
            self._understudy.pipe.close()
            self._understudy = None

    def _understudy_died(self, death: Death) -> None:
        if self._understudy is not None and self._understudy.process == death.process:
            log.info("the understudy has died (signal %s)", death.signal)
            self._dismiss()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _ask(
        self,
        letter: letters.Start | letters.Rehearse | letters.ServeStore,
        files: tuple[int, ...],
        on_death: Callable[[Death], None],
    ) -> Process:
        await self.ready()
        if self._pipe is None:
            raise ZygoteLost("the zygote is gone")
        future: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._starting[letter.id] = future, on_death
        try:
            letters.write(self._pipe, letter, files)
        except BrokenPipeError:
            self._lost()
        return await future

    def _read(self) -> None:
        assert self._pipe is not None
        try:
            received = letters.read(self._pipe)
        except BlockingIOError:
            return
        if received is None:
            self._lost()
            return
        letter, files = received
        match letter:
            case letters.Ready():
                assert self._ready is not None
                self._ready.set_result(letter)
            case letters.Started(id, pid):
                self._born(Process(id, pid), files[0])
            case letters.Refused(id, because):
                future, _ = self._starting.pop(id)
                if not future.done():
                    future.set_exception(StartRefused(because))
            case letters.Exited(id, pid, exit_code, signum):
                self._died(id, Death(Process(id, pid), exit_code, signum))
            case _:
                log.error("the zygote sent %s, which only we may send", letter)

    def _born(self, process: Process, pidfd: int) -> None:
        future, on_death = self._starting.pop(process.id)
        child = _Child(process, pidfd, on_death)
        self._children[process.id] = child
        asyncio.get_running_loop().add_reader(pidfd, self._gone, child)
        if future.done():  # nobody waits for it any more
            self.kill(process)
        else:
            future.set_result(process)

    def _gone(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.pidfd)
        unknown = Death(child.process, None, None)
        delay = 0.0 if self._pipe is None else STATUS_TIMEOUT_S
        child.timer = loop.call_later(delay, self._died, child.process.id, unknown)

    def _died(self, id: int, death: Death) -> None:
        child = self._children.get(id)
        if child is not None:
            self._forget(child)
            child.on_death(death)

    def _forget(self, child: _Child) -> None:
        if child.timer is not None:
            child.timer.cancel()
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.process.id]

    def _lost(self) -> None:
        if self._pipe is None:
            return
        asyncio.get_running_loop().remove_reader(self._pipe)
        self._pipe.close()
        self._pipe = None
        lost = ZygoteLost("the zygote has died")
        for future, _ in self._starting.values():
            if not future.done():
                future.set_exception(lost)
        self._starting.clear()
        if self._ready is not None and not self._ready.done():
            self._failures += 1
            self._ready.set_exception(lost)
            self._ready.exception()  # nobody may be waiting for it
        else:
            self._failures = 0
        if self._popen is not None:
            self._popen.wait()
            self._popen = None
        if self._failures >= MOST_FAILURES:
            self.on_lost()
        else:
            log.warning("the zygote has died, and its workers with it; starting another")
            self.open()
            self.watch()
