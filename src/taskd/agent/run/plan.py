"""The plan of one `taskd run`: all mistakes in its arguments are found before anything starts."""

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
from importlib.util import find_spec

from taskd.agent.run import rendezvous
from taskd.agent.run.arguments import FORK
from taskd.agent.zygote.program import Program
from taskd.config import environ
from taskd.core.etcd_choice import FEWEST
from taskd.errors import SettingsError, WrongCommand
from taskd.model.strategies import LADDER
from taskd.runtime.address import Address

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

OWN_ETCD, NO_ETCD = "own", "none"
NO_ETCD_OPTION = f"--etcd {NO_ETCD}"
OUT, ERR = 1, 2
"""The bits of torchrun's --redirects and --tee."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    directory: str
    """Empty: log files are removed at the end."""
    redirects: dict[int, int]
    tee: dict[int, int]
    shown: frozenset[int] | None
    """The local ranks whose output is shown on the console; None: all."""
    line_prefix: str = ""
    """torchrun's template for what comes before each line of a worker on the console."""
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
    """None: any free port."""
    manager_port: int | None = None
    token: str
    insecure: bool = False
    """Whether the job runs without a token although it has several nodes."""
    encrypt_state: bool = False
    """Whether ranks encrypt the state that they send each other."""
    clusterd: str = ""
    """Empty: embedded in the manager."""
    etcd: str = ""
    """HOST:PORT,…: where the job's state is kept, so that any node can lead it. `own`: in an etcd
    that the job starts. Empty: node 0 leads, and must not be lost; or, while `chooses_etcd`, the
    nodes have not chosen yet."""
    etcd_off: str = ""
    """Why the job must not start an etcd unless it is asked to: an option. Empty: it may."""
    etcd_failed: str = ""
    """Why node 0 starts no etcd again: the one that it has started did not answer."""
    witness: bool = False
    """Only a member of the job's etcd, without ranks."""
    strategies: tuple[str, ...] = ()
    """Empty: all."""
    logs: LogSettings
    signals: tuple[signal.Signals, ...]
    grace_s: float
    join_timeout_s: float
    virtual_local_rank: bool
    state_dir: str = ""
    precheck: bool = False
    nics: tuple[str, ...] = ()
    """Network interfaces for the ranks' process groups: the primary, then its backup."""
    nic_failover: bool = False
    dashboard: str = ""
    """host:port where node 0 serves a page about the job; empty: it does not."""
    metrics: str = ""
    """host:port where the manager serves Prometheus metrics; empty: it does not."""
    otlp: str = ""
    """Address of an OpenTelemetry collector for the job's incidents; empty: none."""
    dump_dir: str = ""
    """Where survivors save an emergency checkpoint; empty: as the environment says."""
    checkpoint_every: int = 0
    """After how many steps a checkpoint is written to the same folder; 0: none is."""
    events: bool = False
    """Whether torchelastic's events are shown on the console."""
    prefix: str = "[rank {rank}]: "
    """Comes before each line of a worker on the console."""
    agent_store: bool = True
    """Whether MASTER_ADDR and MASTER_PORT are the address of a store that an agent serves."""
    draws_rank: bool = False
    """Whether the node still has to draw its rank; `node` is then the lowest that it may get."""
    is_first_node: bool | None = None
    """With `draws_rank`, whether this is the first node; None: if the address is its own."""
    local_addr: str = ""
    """This machine's name among the nodes that draw; empty: its host name."""

    @property
    def starts_etcd(self) -> bool:
        """Whether the nodes of this job run an etcd of their own."""
        return self.nodes > 1 and self.etcd == OWN_ETCD

    @property
    def chooses_etcd(self) -> bool:
        """Whether the nodes of this job choose together if they start an etcd: node 0 cannot know
        whether a spare or a witness will come, and two nodes alone are better off without."""
        return self.nodes >= FEWEST and self.etcd == ""

    @property
    def spare(self) -> bool:
        """A node beyond those that the job starts with: no ranks until another node is lost."""
        return self.node >= self.nodes

    def with_node(self, node: int) -> Plan:
        """The same plan once the node's rank is known."""
        first = node * self.local_size
        return replace(self, node=node, first_rank=first, draws_rank=False)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + (0 if self.spare else self.local_size))

    def node_and_local_rank(self, rank: int) -> tuple[int, int]:
        """The node and the local rank that this rank had at the job's first start."""
        if rank in self.ranks:
            return self.node, rank - self.first_rank
        return divmod(rank, self.local_size)


def _dashboard(listen: str, problems: list[str]) -> str:
    missing = [name for name in ("starlette", "uvicorn") if listen and find_spec(name) is None]
    if missing:
        problems.append(f"--dashboard needs {missing[0]}: pip install 'taskd[dashboard]'")
    try:
        if listen and not Address.parse(listen).is_loopback:
            problems.append(
                f"--dashboard: {listen} is reachable from other machines, which needs a "
                "certificate; start the page by itself: taskd dashboard JOB --listen HOST:PORT "
                "--tls-cert FILE --tls-key FILE"
            )
    except SettingsError:
        problems.append(f"--dashboard must be HOST:PORT, got {listen!r}")
    return listen


def read(args: argparse.Namespace) -> Plan:
    """Raises WrongCommand with all mistakes."""
    problems: list[str] = []
    nodes = _nodes(args.nnodes, problems)
    if args.standalone:
        nodes = 1
    rdzv = rendezvous.read(args, nodes, problems)
    max_restarts = UNLIMITED_RESTARTS if args.max_restarts is None else int(args.max_restarts)
    if max_restarts < 0:
        problems.append(f"--max-restarts must not be negative, got {max_restarts}")
    if args.logs_specs:
        problems.append("--logs-specs is not supported: use --log-dir, --redirects and --tee")
    if args.numa_binding:
        problems.append("--numa-binding is not supported: use numactl with --no-python")
    for address in args.clusterd.split(",") if args.clusterd else ():
        host, _, clusterd_port = address.rpartition(":")
        if not (host and clusterd_port.isdigit() and int(clusterd_port) < 65536):
            problems.append(f"--clusterd must be HOST:PORT, got {address!r}")
    local_size = _local_size(args.nproc_per_node, problems)
    program = _program(args, problems)
    run_id = str(uuid.uuid4()) if args.standalone else args.rdzv_id
    job = args.job_id or (run_id if run_id != "none" and not args.standalone else "")
    plan = Plan(
        program=program,
        spawn=args.start_method != FORK or program.kind == "exec",
        preload=(*PRELOAD, *_modules(args.preload)),
        job=job or f"job-{uuid.uuid4().hex[:8]}" if nodes == 1 else job or "job",
        run_id=run_id,
        role=args.role,
        nodes=nodes,
        node=rdzv.node,
        draws_rank=rdzv.draws_rank,
        is_first_node=rdzv.is_first_node,
        local_size=local_size,
        world_size=nodes * local_size,
        first_rank=rdzv.node * local_size,
        max_restarts=max_restarts,
        master_addr=rdzv.address,
        master_port=rdzv.port,
        local_addr=args.local_addr or "",
        manager_port=args.manager_port or (MANAGER_PORT if nodes > 1 else None),
        token=_token(nodes, args.insecure, problems),
        insecure=args.insecure,
        encrypt_state=_encrypt_state(args, problems),
        clusterd=args.clusterd,
        etcd=_etcd(args, nodes, problems),
        etcd_off=_etcd_off(args),
        witness=args.witness,
        strategies=_strategies(args.strategies, problems),
        logs=_logs(args, local_size, problems),
        signals=_signals(args.signals_to_handle, problems),
        grace_s=_grace(args, problems),
        join_timeout_s=rdzv.join_timeout_s,
        virtual_local_rank=args.virtual_local_rank,
        state_dir=args.state_dir,
        precheck=args.precheck,
        nics=_nics(args, problems),
        nic_failover=args.nic_failover,
        dashboard=_dashboard(args.dashboard, problems),
        metrics=args.metrics,
        otlp=args.otlp,
        dump_dir=os.path.abspath(args.dump_dir),
        checkpoint_every=args.checkpoint_every or 0,
        events=args.event_log_handler == "console",
    )
    if os.path.isfile(args.dump_dir):
        problems.append(f"--dump-dir {args.dump_dir} is a file: expected a directory")
    if plan.checkpoint_every < 0:
        problems.append(f"--checkpoint-every must not be negative, got {plan.checkpoint_every}")
    if args.event_log_handler not in ("null", "console"):
        problems.append(
            f"--event-log-handler: unknown value {args.event_log_handler!r} "
            "(expected null or console)"
        )
    if problems:
        raise WrongCommand(problems)
    return plan


def _nodes(text: str, problems: list[str]) -> int:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    lowest, highest = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < lowest <= highest:
        problems.append(f"--nnodes must be a positive number or MIN:MAX, got {text!r}")
    return highest


def _local_size(text: str, problems: list[str]) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text not in ("auto", "gpu", "xpu"):
        problems.append(
            f"--nproc-per-node must be a positive number, auto, cpu, gpu or xpu, got {text!r}"
        )
        return 1
    device = "torch.accelerator" if text == "auto" else f"torch.{text.replace('gpu', 'cuda')}"
    count = f"import torch; print({device}.device_count() if {device}.is_available() else 0)"
    asked = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    found = int(asked.stdout) if asked.stdout.strip().isdecimal() else 0
    if found == 0 and text != "auto":
        problems.append(f"--nproc-per-node {text}: torch finds no such device on this machine")
    return found or os.cpu_count() or 1


def _program(args: argparse.Namespace, problems: list[str]) -> Program:
    arguments = tuple(args.training_script_args)
    if args.no_python:
        if args.module:
            problems.append("--no-python and --module exclude each other: give only one")
        return Program("exec", args.training_script, arguments)
    if args.module:
        return Program("module", args.training_script, arguments)
    if not os.path.exists(args.training_script):
        problems.append(f"no such script: {args.training_script!r}")
    return Program("script", args.training_script, arguments)


def _modules(preload: list[str]) -> list[str]:
    return [name for text in preload for name in text.split(",") if name]


def _token(nodes: int, insecure: bool, problems: list[str]) -> str:
    """A generated secret, if one process starts the whole job.

    Several launchers cannot agree on one before they meet, so the user has to set it.
    """
    token = environ.get("TASKD_TOKEN", "")
    if not token and nodes > 1 and not insecure:
        problems.append(
            "a job of several nodes needs a secret, because any process that reaches its ports "
            "could otherwise join it and run code in its ranks: set TASKD_TOKEN to the same value "
            "on all nodes (such as the output of `openssl rand -hex 32`). In a network that you "
            "trust completely, --insecure starts it without one"
        )
    return token or (uuid.uuid4().hex if nodes == 1 else "")


def _etcd(args: argparse.Namespace, nodes: int, problems: list[str]) -> str:
    if args.witness and args.etcd != OWN_ETCD and (args.etcd or nodes < FEWEST):
        problems.append("--witness is a member of the etcd that the job starts: use --etcd own")
    if args.witness and nodes < 2:
        problems.append("--witness needs --nnodes of 2 or more")
    if args.etcd == OWN_ETCD:
        return OWN_ETCD
    if args.etcd == NO_ETCD:
        return ""
    for address in filter(None, args.etcd.split(",")):
        host, _, port = address.strip().rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) < 65536):
            problems.append(f"--etcd must be HOST:PORT,HOST:PORT,…, own or none, got {address!r}")
    if args.etcd and nodes == 1:
        problems.append("--etcd needs --nnodes of 2 or more: it is for the loss of a node")
    return str(args.etcd)


def _etcd_off(args: argparse.Namespace) -> str:
    if args.etcd == NO_ETCD:
        return NO_ETCD_OPTION
    if args.clusterd:
        return "--clusterd: the two together are not tested. Use --etcd own on all nodes to try it"
    if args.state_dir:
        return (
            "--state-dir: with etcd, the journal for `taskd replay` is not kept after the end. Use "
            "--etcd own on all nodes if that is fine"
        )
    return ""


def _encrypt_state(args: argparse.Namespace, problems: list[str]) -> bool:
    if args.encrypt_state and args.insecure:
        problems.append("--encrypt-state needs the job's secret: set TASKD_TOKEN, not --insecure")
    if args.encrypt_state and find_spec("cryptography") is None:
        problems.append(
            "--encrypt-state needs the library `cryptography`, which is not installed: "
            "pip install 'taskd[secure]', on every node"
        )
    return bool(args.encrypt_state)


def _strategies(text: str, problems: list[str]) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := [word for word in chosen if word not in set(LADDER)]:
        expected = ", ".join(LADDER)
        problems.append(
            f"--strategies: unknown value {', '.join(unknown)} (expected some of {expected})"
        )
    return chosen


def _nics(args: argparse.Namespace, problems: list[str]) -> tuple[str, ...]:
    named = tuple(word.strip() for word in args.nics.split(",") if word.strip())
    if len(named) > 2 or len(set(named)) < len(named):
        problems.append(
            f"--nics must be PRIMARY or PRIMARY,BACKUP with different names, got {args.nics!r}"
        )
    if args.nic_failover and len(named) < 2:
        problems.append("--nic-failover needs --nics PRIMARY,BACKUP")
    return named


def _logs(args: argparse.Namespace, local_size: int, problems: list[str]) -> LogSettings:
    if args.log_dir and os.path.isfile(args.log_dir):
        problems.append(f"--log-dir {args.log_dir} is a file: expected a directory")
    shown: frozenset[int] | None = None
    if args.local_ranks_filter:
        words = args.local_ranks_filter.split(",")
        if all(word.strip().isdecimal() for word in words):
            shown = frozenset(map(int, words))
        else:
            problems.append(
                "--local-ranks-filter must be numbers separated by commas, got "
                f"{args.local_ranks_filter!r}"
            )
    return LogSettings(
        directory=args.log_dir or "",
        redirects=_streams("--redirects", args.redirects, local_size, problems),
        tee=_streams("--tee", args.tee, local_size, problems),
        shown=shown,
        line_prefix=args.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        stdout_filters=tuple(args.duplicate_stdout_filters),
        stderr_filters=tuple(args.duplicate_stderr_filters),
    )


def _streams(name: str, text: str, local_size: int, problems: list[str]) -> dict[int, int]:
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(local_size), int(text))
    if re.fullmatch(r"(\d+:[0-3],)*\d+:[0-3]", text):
        pairs = (item.split(":") for item in text.split(","))
        return {int(rank): int(which) for rank, which in pairs}
    problems.append(f"{name} must be 0 to 3, or RANK:N,RANK:N,… with N from 0 to 3, got {text!r}")
    return {}


def _signals(text: str, problems: list[str]) -> tuple[signal.Signals, ...]:
    chosen = []
    for word in text.split(","):
        name = word.strip()
        if name in signal.Signals.__members__:
            chosen.append(signal.Signals[name])
        elif name:
            problems.append(
                f"--signals-to-handle: unknown signal {name!r} (expected names such as SIGTERM)"
            )
    return tuple(chosen)


def _grace(args: argparse.Namespace, problems: list[str]) -> float:
    text = args.shutdown_timeout
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
    """A listening socket. Raises SettingsError if the port is taken, or the address not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
    except OSError as error:
        listener.close()
        raise SettingsError(
            [
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another --master-port "
                "or --manager-port, or stop the process that uses it"
            ]
        ) from None
    listener.listen(backlog)
    return listener
