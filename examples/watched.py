"""What the numbered examples share: a job under `taskd run` to watch and to inject faults into."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from machines import Machines

HERE = Path(__file__).resolve().parent
TASKD = str(Path(sys.executable).with_name("taskd"))
TIMEOUT_S = 120.0


class Job:
    """A running `taskd run`, its output, and the views of it from `taskd status --watch`."""

    def __init__(self, process: subprocess.Popen[str], job_id: str, inside: list[str]) -> None:
        self.process, self.id, self._inside = process, job_id, inside
        self.output: list[str] = []
        self.incident = 0
        """The last incident before the injected fault."""
        self.views = self._watch()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        """The launchers of all nodes except node 0."""
        self.start_node: Callable[[int], subprocess.Popen[bytes]]

    def _watch(self) -> Iterator[dict[str, Any]]:
        """One view of the job after every change, until it ends. None is lost between two waits."""
        command = [*self._inside, TASKD, "status", self.id, "--watch", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            try:
                for line in watching.stdout:
                    yield json.loads(line)
            finally:
                watching.kill()

    def until(self, happened: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        for view in self.views:
            if happened(view):
                return view
        raise SystemExit(f"the job ended before {what}")

    def at_step(self, step: int) -> dict[str, Any]:
        return self.until(
            lambda view: view["line"]["step"] >= step and view["line"]["state"] == "Idle",
            f"step {step}",
        )

    def at_size(self, ranks: int) -> dict[str, Any]:
        """Wait until so many ranks train, and show the manager's account of it."""

        def trains(view: dict[str, Any]) -> bool:
            at_rest = view["line"]["state"] in ("Idle", "Shrunk")
            size = view["line"]["world"]
            return at_rest and size == ranks and view["manager"].startswith("Training")

        view = self.until(trains, f"{ranks} ranks trained")
        say(f"{ranks} ranks at step {view['line']['step']}: {_last(view)}")
        return view

    def send_signal(self, rank: int, sig: signal.Signals, view: dict[str, Any]) -> None:
        pid = pids(view)[rank]
        self.incident = view["line"]["incident"]
        say(f"{sig.name} to rank {rank} (pid {pid}) at step {view['line']['step']}")
        os.kill(pid, sig)

    def cut_links(self, rank: int, view: dict[str, Any]) -> None:
        """Cut every connection between this rank and the others, as a flapping link does."""
        known = pids(view)
        self.incident = view["line"]["incident"]
        theirs = {port for other in known if other != rank for port in _ports(known[other])}
        count = 0
        for link, peer in _links(known[rank]):
            if peer in theirs:
                link.shutdown(socket.SHUT_RDWR)
                count += 1
        say(f"{count} links of rank {rank} cut at step {view['line']['step']}")

    def lose_node(self, node: int, view: dict[str, Any]) -> None:
        """Kill the node's launcher. Its ranks and their memory are lost with it."""
        self.incident = view["line"]["incident"]
        say(f"SIGKILL to node {node} at step {view['line']['step']}")
        self.nodes[node].kill()
        self.nodes[node].wait()

    def return_node(self, node: int) -> None:
        """Start the same command again on the same node."""
        say(f"node {node} is started again")
        self.nodes[node] = self.start_node(node)

    def recovered(self) -> dict[str, Any]:
        """Wait until the job has recovered from the last fault, and show the account of it."""

        def over(view: dict[str, Any]) -> bool:
            incident = view["line"]["incident"]
            reported = f"last: incident {incident}," in view["manager"]
            return incident > self.incident and view["line"]["state"] == "Idle" and reported

        view = self.until(over, "it recovered")
        say(_last(view))
        return view

    def end(self) -> str:
        """Wait for the end; return the digest of the weights that the script printed."""
        if self._exit_code() != 0:
            raise SystemExit(f"the job ended with {self.process.returncode}")
        found = re.search(r"weights (\w+)", "".join(self.output))
        return found.group(1) if found else ""

    def fail(self) -> None:
        """Wait for the end of the job, which must fail."""
        if self._exit_code() == 0:
            raise SystemExit("the job succeeded although it could not be repaired")

    def _exit_code(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            say(line.rstrip())
        return self.process.wait(TIMEOUT_S)


@contextmanager
def training(
    script: str,
    *arguments: object,
    options: tuple[str, ...] = (),
    folder: str = ".",
    nodes: int = 1,
    machines: Machines | None = None,
    ranks: int = 4,
) -> Iterator[Job]:
    """Run the script under `taskd run`, with four ranks. All processes end with this block."""
    nodes = 2 if machines else nodes
    job_id = f"example-{os.getpid()}-{os.urandom(2).hex()}"
    command = [TASKD, "run", "--nproc-per-node", str(ranks // nodes), "--job-id", job_id, *options]
    if nodes > 1:
        ports = ["--master-port", str(free_port()), "--manager-port", str(free_port())]
        command += ["--nnodes", str(nodes), *ports]
    if machines:
        command += ["--master-addr", machines.address(0, 1)]
    inside = [machines.inside(node) if machines else [] for node in range(nodes)]
    what = [str(HERE / script), *map(str, arguments)]
    environment = {**os.environ, "TASKD_TOKEN": os.urandom(16).hex()}

    def start_node(node: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*inside[node], *command, "--node-rank", str(node), *what],
            cwd=folder,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    process = subprocess.Popen(
        inside[0] + command + what,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        cwd=folder,
        env=environment,
    )
    deadline = Timer(TIMEOUT_S, process.kill)
    deadline.start()
    job = Job(process, job_id, inside[0])
    job.start_node = start_node
    try:
        job.nodes = {node: start_node(node) for node in range(1, nodes)}
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
            if "taskd status" in line:
                break
        yield job
    finally:
        deadline.cancel()
        for one in (process, *job.nodes.values()):
            one.kill()
            one.wait()
        assert process.stdout is not None
        process.stdout.close()


def _last(view: dict[str, Any]) -> str:
    """The manager's account of the last incident."""
    return str(view["manager"].split("| last: ")[-1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def pids(view: dict[str, Any]) -> dict[int, int]:
    return {known["rank"]: known["pid"] for known in view["ranks"]}


def _ports(pid: int) -> set[int]:
    return {link.getsockname()[1] for link, _ in _links(pid)}


def _links(pid: int) -> Iterator[tuple[socket.socket, int]]:
    """The connections of one of our processes, duplicated here, each with its remote port."""
    pidfd = os.pidfd_open(pid)
    pidfd_getfd = 438
    for name in os.listdir(f"/proc/{pid}/fd"):
        duplicate = ctypes.CDLL(None).syscall(pidfd_getfd, pidfd, int(name), 0)
        if duplicate < 0:
            continue
        try:
            with socket.socket(fileno=duplicate) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6):
                    yield link, link.getpeername()[1]
        except OSError:
            continue  # Not a socket, or not connected.
    os.close(pidfd)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def compare(disturbed: str, undisturbed: str) -> None:
    same = disturbed == undisturbed != ""
    print(f"weights identical to the undisturbed run: {'yes' if same else 'NO'}", flush=True)
    if not same:
        raise SystemExit(1)
