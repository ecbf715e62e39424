"""Runs `taskd run` and checks what it does and what it leaves: used by the launcher's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import psutil

from taskd.agent.node_resources import SHARED_MEMORY
from taskd.agent.zygote.protocol import STACK_SIGNAL

DEADLINE_S = 90.0
STACKS, RUNS = "stacks.txt", "Python runs"
"""The name of the file with a rank's stacks, and how a rank ends them if it runs Python."""
STACKS_S = 2.0


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


TOKEN = "the same secret on all nodes"
COUNTED = """
    import threading

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    job = taskd.init()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps({steps}):
        with step:
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.1)
        print(f"step {int(step)} with {len(job.members)} ranks", flush=True)
"""


def training(folder: Path, steps: int) -> str:
    """A script that says how many ranks train in each step."""
    return script(folder, COUNTED.replace("{steps}", str(steps)))


class Job:
    """One running `taskd run`, with its output in pipes."""

    under: tuple[str, ...] = ()
    """A command that replaces itself by it."""

    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.folder, self.words = folder, words
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        several = any(word.startswith("--nnodes=") for word in words)
        token = {"TASKD_TOKEN": TOKEN} if several else {}
        self.popen = subprocess.Popen(
            [*self.under, sys.executable, "-m", "taskd", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), **token, **env},
        )
        self.process = psutil.Process(self.popen.pid)
        self.memory: set[Path] = set()
        self.ports: set[int] = set()
        weakref.finalize(self, _end, self.popen)

    def wait_for(self, text: str) -> list[str]:
        """Read the workers' output up to a line that contains this text."""
        assert self.popen.stdout is not None
        seen = []
        for line in self.popen.stdout:
            seen.append(line)
            if text in line:
                return seen
        assert self.popen.stderr is not None
        raise AssertionError(f"no {text!r} in {seen}; {self.popen.stderr.read()}")

    def signal(self, signum: int = signal.SIGTERM) -> None:
        self.popen.send_signal(signum)

    def family(self) -> list[psutil.Process]:
        """All current descendants of the launcher."""
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def worker(self, rank: int) -> psutil.Process:
        return next(p for p in self.family() if _thread_name(p.pid) == f"taskd:rank{rank}")

    def manager(self) -> psutil.Process:
        return next(p for p in self.process.children() if "taskd.manager" in p.cmdline())

    def stacks(self) -> str:
        """Where every thread of every rank is, as far as Python knows it."""
        ranks = [one for one in self.family() if _thread_name(one.pid).startswith("taskd:rank")]
        return "\n".join(f"{_thread_name(one.pid)}:\n{_stacks(one)}" for one in ranks)

    def left(self) -> list[Path]:
        """Our own temporary files. Torch's compiler leaves a directory even with torchrun."""
        return [*self.temporary.glob("taskd*"), *(path for path in self.memory if path.exists())]

    def look(self) -> None:
        """Remember the job's current ports and shared memory."""
        for process in (self.process, *self.family()):
            try:
                command, opened = process.cmdline(), process.net_connections("tcp")
            except psutil.Error:
                continue
            self.ports |= {each.laddr.port for each in opened if each.status == "LISTEN"}
            removed = (word.partition("=")[2] for word in command if word.startswith("--remove="))
            self.memory |= {Path(word) for word in removed if word.startswith(SHARED_MEMORY)}

    def listening(self) -> set[int]:
        """Those of its ports that are still open."""
        open_now = psutil.net_connections("tcp")
        return self.ports & {e.laddr.port for e in open_now if e.laddr and e.status == "LISTEN"}

    def end(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Wait for its end; fails if anything is left behind."""
        self.look()
        family = self.family() if self.popen.poll() is None else []
        try:
            out, err = self.popen.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired as late:
            stacks = self.stacks()
            self.popen.kill()
            out, err = self.popen.communicate(timeout=DEADLINE_S)
            why = f"the job has not ended after {deadline_s:g} s"
            raise AssertionError("\n".join((why, stacks, out, err))) from late
        _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
        assert not alive, f"left behind: {alive}"
        assert not self.left(), f"files are left behind: {self.left()}"
        assert not self.listening(), f"ports are left open: {self.listening()}"
        return Ended(self.popen.returncode, out, err)


def _end(popen: subprocess.Popen[str]) -> None:
    """Kill a job whose test has failed."""
    if popen.poll() is None:
        popen.kill()
        popen.communicate()


def _stacks(process: psutil.Process) -> str:
    """What a rank writes when it is asked. A last line is missing if its main thread is in native
    code, which it has not left in time."""
    try:
        opened = {one.path for one in process.open_files() if one.path.endswith(STACKS)}
        files = {Path(path): Path(path).stat().st_size for path in opened}
        process.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        text = ""
        while time.monotonic() < deadline and RUNS not in text:
            new = (file.read_bytes()[before:] for file, before in files.items())
            text = b"".join(new).decode(errors="replace")
    except (psutil.Error, OSError) as error:
        return f"no stacks: {error!r}"
    return text


def _thread_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def run(folder: Path, *words: str, **env: str) -> Ended:
    return Job(folder, *words, **env).end()


def script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


TRAIN = """
    import os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("DIE") == f"{rank}.{attempt}.{step}":
            os.kill(os.getpid(), 9)
    if rank == 0:
        print("weights", sum(p.sum().item() for p in model.parameters()), "attempt", attempt)
    dist.destroy_process_group()
"""
"""A small job without TaskD's API. DIE=rank.attempt.step kills one of its ranks."""
