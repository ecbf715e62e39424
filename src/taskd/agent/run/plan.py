"""What `taskd run` is to do: every mistake in its arguments is found before anything starts."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass, replace

from taskd.agent.run import rendezvous
from taskd.agent.run.arguments import FORK
from taskd.agent.zygote.program import Program
from taskd.config import environ
from taskd.errors import SettingsError

UNLIMITED_RESTARTS = 32767
MANAGER_PORT = 9601
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",
    "torch.nn.parallel",
    "taskd.torch",
)
STRATEGIES = ("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")

OUT, ERR = 1, 2
"""The bits of torchrun's --redirects and --tee."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    directory: str
    """Empty: nothing is kept."""
    redirects: dict[int, int]
    tee: dict[int, int]
    shown: frozenset[int] | None
    """The local ranks whose output is shown on the console; None: all."""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    program: Program
    spawn: bool
    preload: tuple[str, ...]
    job: str
    run_id: str
    role: str
    nodes: int
    node: int
    local_size: int
    world_size: int
    first_rank: int
    """The global rank of this node's first worker."""
    max_restarts: int
    master_addr: str
    master_port: int | None
    """None: any free one."""
    manager_port: int | None
    token: str
    clusterd: str
    """Empty: embedded in the manager."""
    strategies: tuple[str, ...]
    logs: Logs
    signals: tuple[signal.Signals, ...]
    grace_s: float
    join_timeout_s: float
    virtual_local_rank: bool
    state_dir: str
    precheck: bool = False
    nics: tuple[str, ...] = ()
    """Interfaces for the ranks' groups: the primary, then its backup."""
    nic_failover: bool = False
    metrics: str = ""
    """host:port where the manager serves Prometheus; empty: nowhere."""
    dump_dir: str = ""
    """Where survivors leave a checkpoint for the next start; empty: as the environment says."""
    events: bool = False
    """Whether torchelastic's events are shown on the console."""
    prefix: str = "[rank {rank}]: "
    """What stands before a line of a worker on the console."""
    agent_store: bool = True
    """Whether MASTER_ADDR and MASTER_PORT name a store that is served by an agent."""
    draws: bool = False
    """Whether `node` is not known yet: the least that it may be."""
    hosts: bool | None = None
    """With `draws`, whether this is the first node; None: look."""
    local_addr: str = ""
    """This machine's name among those that draw; empty: its own."""

    @property
    def spare(self) -> bool:
        """A node beyond those that the job starts with: it has no ranks before one is lost."""
        return self.node >= self.nodes

    def placed(self, node: int) -> Plan:
        """The same once the node's rank is known."""
        first = node * self.local_size
        return replace(self, node=node, first_rank=first, draws=False)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + (0 if self.spare else self.local_size))

    def place_of(self, rank: int) -> tuple[int, int]:
        """The node and the place on it that the rank was given by the job's first start."""
        if rank in self.ranks:
            return self.node, rank - self.first_rank
        return divmod(rank, self.local_size)


def read(told: argparse.Namespace) -> Plan:
    """Raises SettingsError with everything that is wrong."""
    problems: list[str] = []
    nodes = _nodes(told.nnodes, problems)
    if told.standalone:
        nodes = 1
    meeting = rendezvous.read(told, nodes, problems)
    if int(told.max_restarts) < 0:
        problems.append(f"--max-restarts must not be negative, got {told.max_restarts}")
    if told.logs_specs:
        problems.append("--logs-specs is not supported: use --log-dir, --redirects, --tee")
    if told.numa_binding:
        problems.append("--numa-binding is not supported: bind with numactl and --no-python")
    host, _, clusterd_port = told.clusterd.rpartition(":")
    if told.clusterd and not (host and clusterd_port.isdigit() and int(clusterd_port) < 65536):
        problems.append(f"--clusterd must be HOST:PORT, got {told.clusterd!r}")
    local_size = _local_size(told.nproc_per_node, problems)
    program = _program(told, problems)
    run_id = str(uuid.uuid4()) if told.standalone else told.rdzv_id
    job = told.job_id or (run_id if run_id != "none" and not told.standalone else "")
    plan = Plan(
        program=program,
        spawn=told.start_method != FORK or program.kind == "exec",
        preload=(*PRELOAD, *_modules(told.preload)),
        job=job or f"job-{uuid.uuid4().hex[:8]}" if nodes == 1 else job or "job",
        run_id=run_id,
        role=told.role,
        nodes=nodes,
        node=meeting.node,
        draws=meeting.draws,
        hosts=meeting.hosts,
        local_size=local_size,
        world_size=nodes * local_size,
        first_rank=meeting.node * local_size,
        max_restarts=int(told.max_restarts) or UNLIMITED_RESTARTS,
        master_addr=meeting.address,
        master_port=meeting.port,
        local_addr=told.local_addr or "",
        manager_port=told.manager_port or (MANAGER_PORT if nodes > 1 else None),
        token=_token(nodes),
        clusterd=told.clusterd,
        strategies=_strategies(told.strategies, problems),
        logs=_logs(told, local_size, problems),
        signals=_signals(told.signals_to_handle, problems),
        grace_s=_grace(told, problems),
        join_timeout_s=meeting.join_timeout_s,
        virtual_local_rank=told.virtual_local_rank,
        state_dir=told.state_dir,
        precheck=told.precheck,
        nics=_nics(told, problems),
        nic_failover=told.nic_failover,
        metrics=told.metrics,
        dump_dir=os.path.abspath(told.dump_dir),
        events=told.event_log_handler == "console",
    )
    if os.path.isfile(told.dump_dir):
        problems.append(f"--dump-dir {told.dump_dir} is a file")
    if told.event_log_handler not in ("null", "console"):
        problems.append(f"--event-log-handler: there is no {told.event_log_handler!r}")
    if problems:
        raise SettingsError(problems)
    return plan


def _nodes(text: str, problems: list[str]) -> int:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        problems.append(f"--nnodes must be a number or MIN:MAX, got {text!r}")
    return most


def _local_size(text: str, problems: list[str]) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text not in ("auto", "gpu", "xpu"):
        problems.append(f"--nproc-per-node must be a number, auto, cpu, gpu or xpu, got {text!r}")
        return 1
    device = "torch.accelerator" if text == "auto" else f"torch.{text.replace('gpu', 'cuda')}"
    count = f"import torch; print({device}.device_count() if {device}.is_available() else 0)"
    asked = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    found = int(asked.stdout) if asked.stdout.strip().isdecimal() else 0
    if found == 0 and text != "auto":
        problems.append(f"--nproc-per-node {text}: there is no such device here")
    return found or os.cpu_count() or 1


def _program(told: argparse.Namespace, problems: list[str]) -> Program:
    arguments = tuple(told.training_script_args)
    if told.no_python:
        if told.module:
            problems.append("--no-python and --module exclude each other")
        return Program("exec", told.training_script, arguments)
    if told.module:
        return Program("module", told.training_script, arguments)
    if not os.path.exists(told.training_script):
        problems.append(f"there is no script {told.training_script!r}")
    return Program("script", told.training_script, arguments)


def _modules(preload: list[str]) -> list[str]:
    return [name for text in preload for name in text.split(",") if name]


def _token(nodes: int) -> str:
    """A secret that nobody had to choose, where one process starts the whole job.

    Several launchers have nothing in common before they meet: theirs must be given to them.
    """
    return environ.get("TASKD_TOKEN") or (uuid.uuid4().hex if nodes == 1 else "")


def _strategies(text: str, problems: list[str]) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(",") if word.strip())
    if strange := [word for word in chosen if word not in STRATEGIES]:
        known = ", ".join(STRATEGIES)
        problems.append(f"--strategies: unknown {', '.join(strange)}; there are {known}")
    return chosen


def _nics(told: argparse.Namespace, problems: list[str]) -> tuple[str, ...]:
    named = tuple(word.strip() for word in told.nics.split(",") if word.strip())
    if len(named) > 2 or len(set(named)) < len(named):
        problems.append(f"--nics names a primary and a backup interface, got {told.nics!r}")
    if told.nic_failover and len(named) < 2:
        problems.append("--nic-failover needs --nics PRIMARY,BACKUP")
    return named


def _logs(told: argparse.Namespace, local_size: int, problems: list[str]) -> Logs:
    if told.log_dir and os.path.isfile(told.log_dir):
        problems.append(f"--log-dir {told.log_dir} is a file")
    shown: frozenset[int] | None = None
    if told.local_ranks_filter:
        words = told.local_ranks_filter.split(",")
        if all(word.strip().isdecimal() for word in words):
            shown = frozenset(map(int, words))
        else:
            problems.append(
                f"--local-ranks-filter must be numbers, got {told.local_ranks_filter!r}"
            )
    return Logs(
        directory=told.log_dir or "",
        redirects=_streams("--redirects", told.redirects, local_size, problems),
        tee=_streams("--tee", told.tee, local_size, problems),
        shown=shown,
        stdout_filters=tuple(told.duplicate_stdout_filters),
        stderr_filters=tuple(told.duplicate_stderr_filters),
    )


def _streams(name: str, text: str, local_size: int, problems: list[str]) -> dict[int, int]:
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(local_size), int(text))
    if re.fullmatch(r"(\d+:[0-3],)*\d+:[0-3]", text):
        pairs = (item.split(":") for item in text.split(","))
        return {int(rank): int(which) for rank, which in pairs}
    problems.append(f"{name} must be 0 to 3, or RANK:N,…; got {text!r}")
    return {}


def _signals(text: str, problems: list[str]) -> tuple[signal.Signals, ...]:
    chosen = []
    for word in text.split(","):
        name = word.strip()
        if name in signal.Signals.__members__:
            chosen.append(signal.Signals[name])
        elif name:
            problems.append(f"--signals-to-handle: there is no signal {name!r}")
    return tuple(chosen)


def _grace(told: argparse.Namespace, problems: list[str]) -> float:
    text = told.shutdown_timeout
    if text is None:
        text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        problems.append(f"--shutdown-timeout must be a number of seconds, got {text!r}")
    return seconds


def listen(host: str, port: int | None, backlog: int = 2048) -> socket.socket:
    """A listening socket on all addresses, or only on the loopback one; says who has it taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
    except OSError as error:
        listener.close()
        raise SettingsError([f"cannot listen on {host}:{port}: {error.strerror}"]) from None
    listener.listen(backlog)
    return listener


def free_port() -> int:
    """A port that nobody has now; whoever is to listen on it must be quick."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
