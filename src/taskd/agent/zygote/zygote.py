"""A process that has imported torch once and forks workers from that moment on.

Importing torch and what the first optimizer step needs takes seconds, a fork milliseconds. The
zygote has no threads of its own and never touches CUDA, so a fork is as good as a new process.
It is the parent of every worker: it relays their exit status to the agent (`processes.py`), and
ends them all, with all their descendants, when the agent is gone for whatever reason.

One child is forked ahead of its time: the understudy. It goes once through what every training
script does first (`torch/warmup.py`), then waits to be told which rank it is.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from taskd.agent import linux, stacks
from taskd.agent.zygote import attempt_prefix as attempts
from taskd.agent.zygote import prefault as warm
from taskd.agent.zygote import program, sweeper
from taskd.agent.zygote import protocol as letters
from taskd.agent.zygote.program import Program

WORKER_NAME = "taskd:{}"
REHEARSAL = "taskd.torch.warmup"
HELD = {signal.SIGTERM}


@dataclass
class Zygote:
    pipe: socket.socket
    program: Program
    forked: bool
    """False: workers are new processes (`--start-method spawn`, or no Python at all)."""
    folders: tuple[str, ...]
    """To be removed when everybody is gone."""
    ids: dict[int, int] = field(default_factory=dict)
    """The pid of each child that the agent knows, and the id it gave it."""

    def serve(self) -> Program | None:
        """Answer letters until the agent is gone; in a forked worker return what it must run."""
        bell, ring = socket.socketpair()
        for end in (bell, ring):
            end.setblocking(False)
        signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            selector.register(bell, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is bell:
                        with suppress(BlockingIOError):
                            bell.recv(4096)
                        self._reap()
                        continue
                    received = letters.read(self.pipe)
                    if received is None or isinstance(received[0], letters.Leave):
                        self.end_all()
                        if received is None:
                            self._clean_up()
                        return None
                    if self._handle(*received):
                        selector.close()
                        bell.close()
                        ring.close()
                        return self.program

    def end_all(self) -> None:
        """Kill every descendant and wait until none is left."""
        while pids := linux.children():
            for pid in pids:
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _clean_up(self) -> None:
        """The agent has died without a word, so nobody else will do it."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _handle(self, letter: letters.Letter, files: tuple[int, ...]) -> bool:
        """True in a child that must now become the worker."""
        assert isinstance(letter, letters.Start | letters.Rehearse | letters.ServeStore), letter
        # A child is deaf to SIGTERM until it has its own handlers: meanwhile it is kept for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
            letters.write(self.pipe, letters.Refused(letter.id, f"cannot fork: {error.strerror}"))
            for file in files:
                os.close(file)
            return False
        if pid == 0:
            self._leave_the_nest()
            if isinstance(letter, letters.ServeStore):
                from taskd.agent.zygote import store_process as store

                store.serve(letter.host, letter.port, files[0], letter.renewed)
            if isinstance(letter, letters.Rehearse):
                letter, files = _rehearse(files[0], letter.sibling)
            _become(letter, files)
            if not self.forked:
                _replace_by(self.program)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        self.ids[pid] = letter.id
        for file in files:
            os.close(file)
        pidfd = os.pidfd_open(pid)
        with suppress(BrokenPipeError):
            letters.write(self.pipe, letters.Started(letter.id, pid), (pidfd,))
        os.close(pidfd)
        return False

    def _leave_the_nest(self) -> None:
        parent = os.getppid()
        os.setsid()
        linux.die_with_parent()
        if os.getppid() != parent or parent == 1:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        self.pipe.close()

    def _reap(self) -> None:
        while True:
            try:
                gone = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if gone is None:
                return
            if gone.si_pid in self.ids:
                # What the worker has started dies with it. The pid cannot be anybody else's
                # before we have waited for it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(gone.si_pid, signal.SIGKILL)
            os.waitpid(gone.si_pid, 0)
            child = self.ids.pop(gone.si_pid, None)
            if child is not None:
                exited = gone.si_code == os.CLD_EXITED
                code, signum = (gone.si_status, None) if exited else (None, gone.si_status)
                with suppress(BrokenPipeError):
                    letters.write(self.pipe, letters.Exited(child, gone.si_pid, code, signum))


def _rehearse(file: int, sibling: int) -> tuple[letters.Letter, tuple[int, ...]]:
    """Returns when there is a part for this process; ends it when there will never be one."""
    linux.name_process("taskd:understudy")
    if "taskd.torch" in sys.modules:
        importlib.import_module(REHEARSAL).run()
    warm.fill_heap()
    if sibling:
        warm.own_what_others_own(sibling)
    with socket.socket(fileno=file) as pipe:
        letters.write(pipe, letters.Ready([]))
        received = letters.read(pipe)
    if received is None:
        os._exit(0)
    return received


def _become(letter: letters.Letter, files: tuple[int, ...]) -> None:
    """The parts of a process's start that a fork does not do by itself."""
    assert isinstance(letter, letters.Start)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (files[0], 1), (files[1], 2)):
        os.dup2(source, target)
    for file in (null, *files):
        os.close(file)
    os.environ.update(letter.env)  # noqa: TID251 - this is the worker's environment being made
    linux.name_process(WORKER_NAME.format(letter.name))
    # The global generators were seeded once, before the fork.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.seed()
    if path := letter.env.get("TASKD_STACK_FILE"):
        stacks.offer(path)


def _replace_by(chosen: Program) -> NoReturn:
    argv = chosen.argv()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _harm() -> str:
    """What has been done to this process that a fork does not survive; empty if nothing has."""
    if threading.active_count() > 1:
        return "it has started a thread"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has touched CUDA"
    return ""


def preload(modules: list[str]) -> letters.Ready:
    done, failed = [], {}
    for name in modules:
        try:
            importlib.import_module(name)
            if harm := _harm():
                failed[name] = f"{harm}, so it cannot be forked: use --start-method spawn"
            else:
                done.append(name)
        except Exception as error:  # noqa: BLE001 - the modules are the user's, so is the error
            failed[name] = f"{type(error).__name__}: {error}"
    return letters.Ready(done, failed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--remove", action="append", default=[])
    parser.add_argument("program", nargs="+")
    told = parser.parse_args()
    chosen = Program(told.kind, told.program[0], tuple(told.program[1:]))
    linux.name_process("taskd:zygote")
    # Until the imports are done nobody listens at the pipe; the kernel must watch the agent.
    linux.die_with_parent()
    linux.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = socket.socket(fileno=told.fd)
    dismiss_sweeper = sweeper.post(tuple(told.remove), os.getppid(), pipe.fileno())
    ready = preload([name for name in told.preload.split(",") if name])
    attempts.keep_apart()
    gc.collect()
    gc.freeze()
    linux.die_with_parent(0)
    dismiss_sweeper()
    with suppress(BrokenPipeError):  # which is seen, and dealt with, at the next read
        letters.write(pipe, ready)
    forks = not told.spawn and told.kind != "exec"
    forked = Zygote(pipe, chosen, forks, tuple(told.remove)).serve()
    if forked is not None:
        program.run(forked)
