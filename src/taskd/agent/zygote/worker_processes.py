"""The agent's end of the zygote: starts worker processes, notices when they exit, kills them.

An exit is noticed at once through the process's pidfd; the exit status follows from the zygote, its
parent. If the zygote itself dies, its children become the agent's (which is a child subreaper) and
live on: the agent reads their status itself, and the next zygote guards them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from taskd.agent import process_lifetime
from taskd.agent.zygote import protocol
from taskd.agent.zygote.program import Program
from taskd.errors import Transient

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 1.0
"""How long we wait for the exit status after a process is gone, before we report it without."""

MAX_FAILURES = 3
"""Zygotes that die one after another before they are ready; after that we do not start another."""

_BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from taskd.agent.zygote.zygote import main; main()"
)


class ZygoteLost(Transient):
    """The zygote has died; nothing can be started until a new one is ready."""


class StartRefused(Transient):
    """The operating system refused to create a process; the text says why."""


@dataclass(frozen=True, slots=True)
class Process:
    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exit:
    process: Process
    exit_code: int | None
    """None if a signal ended the process, or if its status is not known."""
    signal: int | None


OnExit = Callable[[Exit], None]


@dataclass
class _Child:
    process: Process
    pidfd: int
    on_exit: OnExit
    timer: asyncio.TimerHandle | None = None
    adopted: bool = False
    """Its zygote has died: it is a child of this process."""


@dataclass(frozen=True, slots=True)
class _Standby:
    process: Process
    connection: socket.socket
    """Where it waits for the message that makes it a worker."""


@dataclass
class WorkerProcesses:
    """One zygote and its children. Call all methods in the thread of the event loop."""

    program: Program
    preload: tuple[str, ...] = ()
    spawn: bool = False
    remove: tuple[str, ...] = ()
    """Folders that the zygote removes when the agent and all workers are gone."""
    env: dict[str, str] | None = None
    """The environment of the zygote, which every worker inherits."""
    on_lost: Callable[[], None] = lambda: None
    """Called when zygotes repeatedly die before they are ready."""

    _popen: subprocess.Popen[bytes] | None = None
    _connection: socket.socket | None = None
    _ready: asyncio.Future[protocol.Ready] | None = None
    _failures: int = 0
    _next_id: int = 0
    _starting: dict[int, tuple[asyncio.Future[Process], OnExit]] = field(default_factory=dict)
    _children: dict[int, _Child] = field(default_factory=dict)
    _standby: _Standby | None = None

    def open(self) -> None:
        """Start the zygote's process. Needs no event loop, so that it can come first."""
        process_lifetime.adopt_orphans()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guarded = [(child.process.pid, child.pidfd) for child in self._children.values()]
        with theirs:
            command = [sys.executable, "-u", "-c", _BOOT, f"--fd={theirs.fileno()}"]
            command += [f"--parent={os.getpid()}"]
            command += [f"--kind={self.program.kind}", f"--preload={','.join(self.preload)}"]
            command += ["--spawn"] if self.spawn else []
            command += [f"--remove={folder}" for folder in self.remove]
            command += [f"--guard={pid}:{pidfd}" for pid, pidfd in guarded]
            command += ["--", self.program.target, *self.program.arguments]
            self._popen = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *(pidfd for _, pidfd in guarded)],
                env=self.env,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        ours.setblocking(False)
        self._connection = ours

    def watch(self) -> None:
        """Start to read the zygote's messages; call it once the event loop runs."""
        assert self._connection is not None
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._connection, self._read)

    @property
    def given_up(self) -> bool:
        """Zygotes have died repeatedly before they were ready: no other is started."""
        return self._connection is None

    @property
    def warm(self) -> bool:
        """The zygote has imported everything: a worker could be forked at once."""
        return self._ready is not None and self._ready.done() and not self._ready.exception()

    async def ready(self) -> protocol.Ready:
        """Wait until a zygote has imported everything; raises ZygoteLost if all of them die."""
        while True:
            assert self._ready is not None
            try:
                return await asyncio.shield(self._ready)
            except ZygoteLost:
                if self.given_up:
                    raise

    async def start(
        self, name: str, env: dict[str, str], stdout: int, stderr: int, on_exit: OnExit
    ) -> Process:
        """A new worker: the standby if it is ready, else a fork. The caller closes both files."""
        files = stdout, stderr
        if (process := self._use_standby(name, env, files, on_exit)) is not None:
            return process
        return await self._ask(protocol.Start(self._new_id(), name, env), files, on_exit)

    async def prepare_standby(self, sibling: int = 0, reports: Sequence[str] = ()) -> None:
        """Fork a process ahead of time, which becomes the next worker.

        `sibling`: the pid of a worker that it will resemble. `reports`: as in `StartStandby`.
        """
        if self.spawn or self._standby is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await self._ask(
                    protocol.StartStandby(self._new_id(), sibling, list(reports)),
                    (theirs.fileno(),),
                    self._on_standby_exit,
                )
            except (StartRefused, ZygoteLost) as error:
                ours.close()
                log.info("standby not started: %s", error)
                return
        ours.setblocking(False)
        self._drop_standby()
        self._standby = _Standby(process, ours)

    async def serve_store(
        self, host: str, port: int, listener: int, renewed: bool, on_exit: OnExit
    ) -> Process:
        message = protocol.ServeStore(self._new_id(), host, port, renewed)
        return await self._ask(message, (listener,), on_exit)

    def send_signal(self, process: Process, signum: int) -> None:
        """To this one process, if it is still alive."""
        child = self._children.get(process.id)
        if child is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signum)

    def kill(self, process: Process) -> None:
        """Kill it at once, with everything that it has started in its own process group."""
        if process.id in self._children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that was forked a moment ago has no group of its own yet.
            self.send_signal(process, signal.SIGKILL)

    async def close(self) -> None:
        """End the zygote and all its descendants; returns when they are gone, without reports."""
        self._drop_standby()
        children = list(self._children.values())
        for child in children:
            self._unwatch(child)
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
        adopted = [child for child in children if child.adopted]
        for child in adopted:
            self.kill(child.process)
        for child in adopted:
            await asyncio.to_thread(_exit_status, child, 0)
        for child in children:
            self._forget(child)
        if self._connection is not None:
            with suppress(BrokenPipeError, BlockingIOError):
                protocol.write(self._connection, protocol.Leave())
            self._connection.close()
            self._connection = None
        if self._popen is not None:
            await asyncio.to_thread(self._popen.wait)
            self._popen = None

    def _use_standby(
        self, name: str, env: dict[str, str], files: tuple[int, ...], on_exit: OnExit
    ) -> Process | None:
        """Make the standby this worker. None: there is no standby that is ready."""
        standby = self._standby
        if standby is None:
            return None
        try:
            alive = protocol.read(standby.connection) is not None
            if alive:
                start = protocol.Start(standby.process.id, name, env)
                protocol.write(standby.connection, start, files)
        except BlockingIOError:
            return None  # it still warms up; the next worker can use it
        except BrokenPipeError:
            alive = False
        self._drop_standby()
        if not alive:
            return None
        self._children[standby.process.id].on_exit = on_exit
        return standby.process

    def _drop_standby(self) -> None:
        """A standby that has not become a worker exits when its connection closes."""
        if self._standby is not None:
            self._standby.connection.close()
            self._standby = None

    def _on_standby_exit(self, exited: Exit) -> None:
        if self._standby is not None and self._standby.process == exited.process:
            log.info("standby died: pid=%s signal=%s", exited.process.pid, exited.signal)
            self._drop_standby()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _ask(
        self,
        message: protocol.Start | protocol.StartStandby | protocol.ServeStore,
        files: tuple[int, ...],
        on_exit: OnExit,
    ) -> Process:
        for left in reversed(range(MAX_FAILURES)):
            await self.ready()
            if self._connection is None:
                raise ZygoteLost("the zygote has died, and no other is started")
            future: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
            self._starting[message.id] = future, on_exit
            try:
                protocol.write(self._connection, message, files)
            except BrokenPipeError:
                self._on_zygote_exit()
            try:
                return await future
            except ZygoteLost:
                # A process that was forked has said so: this one was not. Ask the next zygote.
                if not left or self.given_up:
                    raise
        raise AssertionError("unreachable")

    def _read(self) -> None:
        assert self._connection is not None
        try:
            received = protocol.read(self._connection)
        except BlockingIOError:
            return
        if received is None:
            self._on_zygote_exit()
            return
        self._handle(*received)

    def _handle(self, message: protocol.Message, files: tuple[int, ...]) -> None:
        match message:
            case protocol.Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case protocol.Started(id, pid):
                self._on_started(Process(id, pid), files[0])
            case protocol.Refused(id, because):
                future, _ = self._starting.pop(id)
                if not future.done():
                    future.set_exception(StartRefused(because))
            case protocol.Exited(id, pid, exit_code, signum):
                if (starting := self._starting.pop(id, None)) is not None:
                    starting[0].set_exception(StartRefused("it ended before it could start"))
                self._report_exit(id, Exit(Process(id, pid), exit_code, signum))
            case _:
                log.error("zygote sent a message that only the agent may send: %s", message)

    def _on_started(self, process: Process, pidfd: int) -> None:
        future, on_exit = self._starting.pop(process.id)
        child = _Child(process, pidfd, on_exit)
        self._children[process.id] = child
        asyncio.get_running_loop().add_reader(pidfd, self._on_gone, child)
        if future.done():  # the caller was cancelled
            self.kill(process)
        else:
            future.set_result(process)

    def _on_gone(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.pidfd)
        delay = 0.0 if child.adopted else STATUS_TIMEOUT_S
        child.timer = loop.call_later(delay, self._report_gone, child)

    def _report_gone(self, child: _Child) -> None:
        """Its zygote has not sent the status: perhaps it is our own child by now."""
        self._report_exit(child.process.id, _exit_status(child, os.WNOHANG))

    def _report_exit(self, id: int, exited: Exit) -> None:
        child = self._children.get(id)
        if child is not None:
            self._forget(child)
            child.on_exit(exited)

    def _unwatch(self, child: _Child) -> None:
        if child.timer is not None:
            child.timer.cancel()
        asyncio.get_running_loop().remove_reader(child.pidfd)

    def _forget(self, child: _Child) -> None:
        self._unwatch(child)
        os.close(child.pidfd)
        del self._children[child.process.id]

    def _on_zygote_exit(self) -> None:
        if self._connection is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        self._read_rest(self._connection)
        self._connection.close()
        self._connection = None
        lost = ZygoteLost("the zygote has died")
        for future, _ in self._starting.values():
            if not future.done():
                future.set_exception(lost)
        self._starting.clear()
        if self._ready is not None and not self._ready.done():
            self._failures += 1
            self._ready.set_exception(lost)
            self._ready.exception()  # marks it as retrieved: no task may be waiting for it
        else:
            self._failures = 0
        if self._popen is not None:
            self._popen.wait()
            self._popen = None
        for child in list(self._children.values()):
            child.adopted = True
            if child.timer is not None:  # it died with the zygote
                self._report_gone(child)
        if self._failures >= MAX_FAILURES:
            self.on_lost()
        else:
            log.warning(
                "zygote died; its %d processes live on; starting another zygote",
                len(self._children),
            )
            self.open()
            self.watch()

    def _read_rest(self, connection: socket.socket) -> None:
        """What the zygote sent before it died: processes that it has started, or seen exit."""
        with suppress(BlockingIOError):
            while (received := protocol.read(connection)) is not None:
                self._handle(*received)


def _exit_status(child: _Child, options: int) -> Exit:
    """The status of our own child, with its process group killed and nothing left of it."""
    unknown = Exit(child.process, None, None)
    try:
        status = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT | options)
        if status is None:
            return unknown
        # Its pid is not reused before it is reaped, so this is still its group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        process_lifetime.end_session(child.process.pid)
    except ChildProcessError:
        return unknown
    exited = status.si_code == os.CLD_EXITED
    code, signum = (status.si_status, None) if exited else (None, status.si_status)
    return Exit(child.process, code, signum)
