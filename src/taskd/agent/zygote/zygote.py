"""The zygote: a process that has imported torch once and from then on forks workers.

To import torch and what the first optimizer step needs takes seconds; a fork takes milliseconds.
The zygote has no threads of its own and never uses CUDA, so a forked process is as good as a new
one. It is the parent of every worker: it sends their exit status to the agent
(`worker_processes.py`). When the agent is gone, for whatever reason, it kills all workers with all
their descendants. If the zygote itself dies, its children become the agent's and live on; the next
zygote guards them, too: it kills them when the agent is gone.

One child is forked ahead of time: the standby. It does once what every training script does first
(`warmup.py`), and then waits for the message that says which rank it becomes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from taskd.agent import process_lifetime, worker_stacks
from taskd.agent.zygote import (
    compiler_use,
    folder_sweeper,
    prefault,
    program,
    protocol,
    torch_store,
)
from taskd.agent.zygote.program import Program

WORKER_NAME = "taskd:{}"
REPORTS_POLL_S = 1.0
WARM_UP = "taskd.torch.startup.warmup"
BLOCKED = {signal.SIGTERM}


@dataclass
class Zygote:
    connection: socket.socket
    program: Program
    forked: bool
    """False: workers are new processes (`--start-method spawn`, or not a Python program)."""
    folders: tuple[str, ...]
    """Removed when the agent and all workers are gone."""
    guarded: dict[int, int] = field(default_factory=dict)
    """Processes that a former zygote has left to the agent: pid and pidfd."""
    ids: dict[int, int] = field(default_factory=dict)
    """The pid of each child that the agent knows, and the id that the agent gave it."""

    def serve(self) -> Program | None:
        """Answer messages until the agent is gone; in a forked worker, return what it must run."""
        wakeup_read, wakeup_write = socket.socketpair()
        for end in (wakeup_read, wakeup_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(wakeup_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wakeup_read:
                        with suppress(BlockingIOError):
                            wakeup_read.recv(4096)
                        self._reap()
                        continue
                    received = protocol.read(self.connection)
                    if received is None or isinstance(received[0], protocol.Leave):
                        self.kill_all()
                        if received is None:
                            process_lifetime.kill_guarded(self.guarded)
                            self._remove_folders()
                        return None
                    if self._handle(*received):
                        selector.close()
                        wakeup_read.close()
                        wakeup_write.close()
                        return self.program

    def kill_all(self) -> None:
        """Kill every descendant and wait until none is left."""
        while pids := process_lifetime.children():
            for pid in pids:
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _remove_folders(self) -> None:
        """The agent has died without `Leave`, so it did not remove them."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _handle(self, message: protocol.Message, files: tuple[int, ...]) -> bool:
        """True in a child that must now become the worker."""
        kinds = protocol.Start | protocol.StartStandby | protocol.ServeStore
        assert isinstance(message, kinds), message
        # The child ignores SIGTERM until it has handlers of its own. Blocked, a SIGTERM that comes
        # before is kept for it and not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
            because = f"cannot fork: {error.strerror}"
            protocol.write(self.connection, protocol.Refused(message.id, because))
            for file in files:
                os.close(file)
            return False
        if pid == 0:
            self._detach(message.id)
            if isinstance(message, protocol.ServeStore):
                torch_store.serve(message.host, message.port, files[0], message.renewed)
            if isinstance(message, protocol.StartStandby):
                message, files = self._stand_by(files[0], message)
            _become_worker(message, files)
            if not self.forked or _driver_has_other_devices():
                _exec(self.program)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        self.ids[pid] = message.id
        for file in files:
            os.close(file)
        return False

    def _stand_by(
        self, file: int, order: protocol.StartStandby
    ) -> tuple[protocol.Message, tuple[int, ...]]:
        """Warm up, then wait for `Start`. Ends the process if the agent closes the connection."""
        process_lifetime.name_process("taskd:standby")
        warmup = importlib.import_module(WARM_UP) if "taskd.torch" in sys.modules else None
        if warmup is not None:
            warmup.run()
            if (code := program.read_ahead(self.program)) is not None:
                warmup.read_script(code)
        prefault.fill_heap()
        if order.sibling:
            prefault.copy_pages_written_by(order.sibling)
        with socket.socket(fileno=file) as connection:
            protocol.write(connection, protocol.Ready([]))
            # The ranks say which devices they use only after their first step.
            while warmup is not None and not select.select([connection], [], [], REPORTS_POLL_S)[0]:
                if warmup.start_driver([Path(report) for report in order.reports]):
                    break
            if warmup is not None and compiler_use.wait(connection, order.sibling):
                warmup.import_compiler()
            received = protocol.read(connection)
        if received is None:
            os._exit(0)
        return received

    def _detach(self, id: int) -> None:
        """In the child: a session, signal handlers and a lifetime that suit a worker."""
        os.setsid()
        # The child itself tells the agent: if the zygote dies now, the agent knows its orphan.
        pidfd = os.pidfd_open(os.getpid())
        try:
            protocol.write(self.connection, protocol.Started(id, os.getpid()), (pidfd,))
        except BrokenPipeError:  # the agent is gone
            os._exit(1)
        for file in (pidfd, *self.guarded.values()):
            os.close(file)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        self.connection.close()

    def _reap(self) -> None:
        while True:
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if status is None:
                return
            if status.si_pid in self.ids:
                # Kill what the worker has started. The pid cannot be reused before we have
                # waited for it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(status.si_pid, signal.SIGKILL)
            os.waitpid(status.si_pid, 0)
            id = self.ids.pop(status.si_pid, None)
            if id is not None:
                exited = status.si_code == os.CLD_EXITED
                code, signum = (status.si_status, None) if exited else (None, status.si_status)
                report = protocol.Exited(id, status.si_pid, code, signum)
                with suppress(BrokenPipeError):
                    protocol.write(self.connection, report)


def _driver_has_other_devices() -> bool:
    """Whether this was a standby whose driver does not see the devices that the worker must see."""
    warmup = sys.modules.get(WARM_UP)
    return warmup is not None and warmup.driver_has_other_devices()


def _become_worker(message: protocol.Message, files: tuple[int, ...]) -> None:
    """Do what a new process gets at its start and a forked one does not."""
    assert isinstance(message, protocol.Start)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (files[0], 1), (files[1], 2)):
        os.dup2(source, target)
    for file in (null, *files):
        os.close(file)
    os.environ.update(message.env)  # noqa: TID251 - this is the worker's environment being made
    process_lifetime.name_process(WORKER_NAME.format(message.name))
    # The global generators were seeded once, before the fork.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.seed()
    if path := message.env.get("TASKD_STACK_FILE"):
        worker_stacks.install(path)


def _exec(chosen: Program) -> NoReturn:
    argv = chosen.argv()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _fork_problem() -> str:
    """What this process has done that makes forking unsafe; empty if nothing."""
    if threading.active_count() > 1:
        return "it has started a thread"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has initialized CUDA"
    return ""


def preload(modules: list[str]) -> protocol.Ready:
    done, failed = [], {}
    for name in modules:
        try:
            importlib.import_module(name)
            if problem := _fork_problem():
                failed[name] = f"{problem}, so it cannot be forked: use --start-method spawn"
            else:
                done.append(name)
        except Exception as error:  # noqa: BLE001 - the user's modules can raise anything
            failed[name] = f"{type(error).__name__}: {error}"
    return protocol.Ready(done, failed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--remove", action="append", default=[])
    parser.add_argument("--guard", action="append", default=[], help="PID:PIDFD")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    chosen = Program(args.kind, args.program[0], tuple(args.program[1:]))
    pairs = (pair.split(":") for pair in args.guard)
    guarded = {int(pid): int(pidfd) for pid, pidfd in pairs}
    # Until the imports are done we do not read the connection, so we would not see that the agent
    # has died; the kernel kills us instead.
    process_lifetime.die_with_parent()
    if os.getppid() != args.parent:  # it died before the kernel knew of our request
        process_lifetime.kill_guarded(guarded)
        folder_sweeper.remove(args.remove)
        return
    process_lifetime.name_process("taskd:zygote")
    process_lifetime.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=args.fd)
    stop_sweeper = folder_sweeper.start(
        tuple(args.remove), guarded, os.getppid(), connection.fileno()
    )
    ready = preload([name for name in args.preload.split(",") if name])
    torch_store.prefix_keys_by_attempt()
    gc.collect()
    gc.freeze()
    process_lifetime.die_with_parent(0)
    stop_sweeper()
    with suppress(BrokenPipeError):  # the next read notices it
        protocol.write(connection, ready)
    forks = not args.spawn and args.kind != "exec"
    worker = Zygote(connection, chosen, forks, tuple(args.remove), guarded).serve()
    if worker is None:
        os._exit(0)  # without freeing what was imported, which takes time and finds nothing of ours
    program.run(worker)
