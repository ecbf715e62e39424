"""`taskd run`: torchrun's command line, with a manager, a proxy and an agent behind it.

The zygote is started before anything else is even imported, and the manager next, so that both
warm up while this process gets ready. Proxy and agent live in this process. Whatever ends it,
nothing stays behind: the zygote sees the end and takes the workers with it, the manager is tied
to us by the kernel.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from taskd.agent import worker_environment as environment
from taskd.agent.run import arguments, plan, rendezvous
from taskd.agent.run import node_ranks as places
from taskd.agent.run.job_account import SUMMARY, is_over
from taskd.agent.run.plan import Plan
from taskd.agent.run.supervisor import Supervisor
from taskd.agent.run_folders import Ground
from taskd.agent.shared_folder import make_folder
from taskd.agent.zygote.worker_processes import Nursery
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.address import Address

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(parser)


def run(told: argparse.Namespace) -> int:
    chosen = plan.read(told)
    _log()
    folders = tempfile.mkdtemp(prefix="taskd-"), make_folder()
    try:
        return _launch(chosen, *folders)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _claim(chosen: Plan) -> socket.socket:
    """The name of this node's part of the job, held for as long as this process lives."""
    if (claim := places.claim(chosen.job, chosen.node)) is not None:
        return claim
    taken = f"job {chosen.job} is being run on node {chosen.node} already"
    raise SettingsError([f"{taken}: wait for its end, or give --job-id"])


@dataclass(frozen=True, slots=True)
class Started:
    """What is on its way when the event loop begins."""

    ground: Ground
    manager: str
    state_dir: str
    supervisor: Supervisor | None
    """Of the manager, on the first node."""


def _launch(chosen: Plan, run_dir: str, beacons: str) -> int:
    nursery = Nursery(
        chosen.program,
        preload=() if chosen.spawn else chosen.preload,
        spawn=chosen.spawn,
        remove=(run_dir, beacons),
        env=environment.base(chosen),
    )
    here = LOOPBACK if chosen.nodes == 1 else rendezvous.everywhere(chosen.master_addr)
    claim = None if chosen.draws else _claim(chosen)
    listener = _listener(chosen, here)
    if chosen.draws and listener is not None:
        claim = _claim(chosen)
    if listener is not None and chosen.manager_port:
        plan.listen(here, chosen.manager_port).close()  # if it is taken, that is said now
    nursery.open()
    if claim is None:
        chosen, claim = _draw(chosen)
    port = listener.getsockname()[1] if listener is not None else chosen.master_port
    manager_port = chosen.manager_port or plan.free_port()
    supervisor = None
    if listener is not None:
        _warn(chosen)
        supervisor = _manager(chosen, str(Address(here, manager_port)), run_dir)
        supervisor.start()
    ground = Ground(
        nursery=nursery,
        run_dir=run_dir,
        beacons=beacons,
        store=f"{chosen.master_addr}:{port}",
        listener=listener,
        serves=listener is not None,
    )
    manager = str(Address(chosen.master_addr, manager_port))
    started = Started(ground, manager, chosen.state_dir or run_dir, supervisor)
    # gRPC tells every closed connection on stderr, which here is the user's.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251 - read by gRPC at its import
    from taskd.agent.run.launcher import launch

    try:
        return launch(chosen, started)
    finally:
        claim.close()


def _listener(chosen: Plan, here: str) -> socket.socket | None:
    """The store's, if this is the first node. Of those that draw, the first one here is that."""
    if not chosen.draws:
        return plan.listen(here, chosen.master_port) if chosen.node == 0 else None
    if chosen.hosts is not None:
        return plan.listen(here, chosen.master_port) if chosen.hosts else None
    if not rendezvous.is_here(chosen.master_addr):
        return None
    try:
        return plan.listen(here, chosen.master_port)
    except SettingsError:
        return None


def _draw(chosen: Plan) -> tuple[Plan, socket.socket]:
    assert chosen.master_port is not None, "several nodes have a port where they meet"
    where = chosen.master_addr, chosen.master_port
    least = max(chosen.node, 1)
    name, limit_s = chosen.local_addr, chosen.join_timeout_s
    node, claim = places.ask(where, chosen.job, least, name, limit_s)
    spare = ", a spare" if node >= chosen.nodes else ""
    say(f"this is node {node} of job {chosen.job}{spare}")
    return chosen.placed(node), claim


def _warn(chosen: Plan) -> None:
    """What is open to others must be said, also where it was wanted."""
    if chosen.nodes > 1 and not chosen.token and not environ.get("TASKD_TLS_CA"):
        say("whoever reaches this machine can join the job: set TASKD_TOKEN to one secret on all")


def _manager(chosen: Plan, listen: str, run_dir: str) -> Supervisor:
    words: tuple[str, ...] = (
        f"--job-id={chosen.job}",
        f"--nodes={chosen.nodes}",
        f"--procs-per-node={chosen.local_size}",
        f"--max-restarts={chosen.max_restarts}",
        f"--listen={listen}",
        f"--clusterd={chosen.clusterd or 'embedded'}",
        f"--strategies={','.join(chosen.strategies)}",
        f"--state-dir={chosen.state_dir or run_dir}",
        f"--join-timeout={chosen.join_timeout_s}",
        f"--dump-dir={chosen.dump_dir}",
        *(["--precheck"] if chosen.precheck else []),
        *([f"--metrics={chosen.metrics}"] if chosen.metrics else []),
    )
    if chosen.nodes > 1:
        words += ("--rescheduling",)  # whoever starts launchers may start one anew
    env = {"TASKD_LOG_LEVEL": "ERROR", **environment.base(chosen), "TASKD_TOKEN": chosen.token}
    account = Path(chosen.state_dir or run_dir) / SUMMARY
    account.unlink(missing_ok=True)  # of an earlier run
    return Supervisor("manager", "taskd.manager", words, env, is_over=lambda: is_over(account))


def _log() -> None:
    """On stderr, and little: what a person must know is said by `say`."""
    level = environ.get("TASKD_LOG_LEVEL", "").upper()
    logging.basicConfig(level=level or "WARNING", format="taskd: %(message)s")
    if not level:
        # Links come and go while everything starts; only the end of it all would be news.
        logging.getLogger("taskd.edge").setLevel(logging.ERROR)


def say(text: str) -> None:
    """To the person who started us."""
    sys.stderr.write(f"taskd: {text}\n")
    sys.stderr.flush()
