"""`taskd run`: torchrun's command line, with a manager, a proxy and an agent behind it.

The zygote is started before anything else is even imported, and the manager next, so that both
warm up while this process gets ready. Proxy and agent run in this process. However it ends, no
process is left behind: the zygote notices the end and kills the workers, and the kernel kills the
manager together with us.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.agent.node_resources import NodeResources, run_folders, worker_processes
from taskd.agent.run import arguments, node_ranks, plan, rendezvous, torch_check
from taskd.agent.run.node_ranks import Claim
from taskd.agent.run.plan import Plan
from taskd.agent.run.supervisor import Supervisor
from taskd.agent.worker_environment import base_environment
from taskd.config import environ
from taskd.errors import EtcdLostAtStart, JobElsewhere, SettingsError
from taskd.runtime.address import Address, free_port

if TYPE_CHECKING:
    from taskd.agent.run.etcd_choice import WithoutEtcd
    from taskd.agent.run.own_etcd import OwnEtcd, WithEtcd
    from taskd.clusterd.etcd.etcd_settings import EtcdAccess

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(parser)


normalized = arguments.normalized


def run(args: argparse.Namespace) -> int:
    chosen = plan.read(args)
    _set_up_log()
    while True:
        # Until the event loop handles it: leave by an exception, so that the folders are removed.
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        with run_folders() as folders:
            try:
                if chosen.witness:
                    from taskd.agent.run.witness import witness

                    return witness(chosen, folders, say)
                return _launch(chosen, folders)
            except JobElsewhere as found:
                from taskd.agent.run import own_etcd

                say(f"{found}: this node joins it")
                own_etcd.remember(chosen, found.addresses)
            except EtcdLostAtStart as lost:
                say(f"{lost}: this node starts again")
                chosen = replace(chosen, etcd_failed=str(lost) if lost.do_without else "")


def _claim(chosen: Plan) -> Claim:
    """Claim this node's part of the job for as long as this process lives."""
    if (claim := node_ranks.claim(chosen.job, chosen.node)) is not None:
        return claim
    running = f"another process already runs node {chosen.node} of job {chosen.job} on this machine"
    raise SettingsError([f"{running}: wait until it ends, or choose another --job-id"])


@dataclass(frozen=True, slots=True)
class Started:
    """What is already starting when the event loop begins."""

    resources: NodeResources
    manager: str
    """Its host:port."""
    state_dir: str
    supervisor: Supervisor | None
    """The manager's, on each node that has one."""
    etcd: EtcdAccess | None = None
    """None: the first node leads the job, for as long as it lasts."""
    member: Supervisor | None = None
    """Of the process that keeps this node's member of the job's own etcd."""
    starts_etcd: bool = False
    """The first member is this node's."""
    without_etcd: WithoutEtcd | None = None
    """The nodes have chosen to run without one."""


def _launch(chosen: Plan, folders: tuple[str, str]) -> int:
    run_dir, beacons = folders
    processes = worker_processes(chosen, folders)
    listen_host = LOOPBACK if chosen.nodes == 1 else rendezvous.wildcard_address(chosen.master_addr)
    claim = None if chosen.draws_rank else _claim(chosen)
    listener = _listener(chosen, listen_host)
    is_first = listener is not None
    if chosen.draws_rank and is_first:
        claim = _claim(chosen)
    if is_first and chosen.manager_port:
        plan.listen(listen_host, chosen.manager_port).close()  # refuse now if the port is taken
    processes.open()
    if warning := torch_check.check():
        say(warning)
    etcd = _own_etcd(chosen, folders, listen_host, is_first)
    # A node that draws its rank draws it from the store of node 0, which waits for the choice.
    if claim is None:
        chosen, claim = _draw_node_rank(chosen)
    port = listener.getsockname()[1] if listener is not None else chosen.master_port
    store = served = f"{chosen.master_addr}:{port}"
    manager_port = chosen.manager_port or free_port()
    manager = here = Address(chosen.master_addr, manager_port)
    chosen, own, without = _keeper(chosen, etcd)
    access = _etcd(chosen) if own is None else own.access
    if not is_first and access is not None:
        # Each node can lead: it has a store and a manager of its own.
        listener, here = _own_ports(chosen, listen_host)
        served = str(Address(here.host, listener.getsockname()[1]))
    supervisor = None
    if listener is not None:
        if is_first:
            _warn_if_open(chosen)
        supervisor = _manager(chosen, listen_host, here, access, run_dir)
        supervisor.start()
        if is_first and access is None:
            _warn_if_node_zero_is_special(chosen)
    resources = NodeResources(
        processes=processes,
        run_dir=run_dir,
        beacons=beacons,
        store=store,
        listener=listener,
        served_store=served if listener is not None else "",
    )
    state_dir = chosen.state_dir or run_dir
    member = own.member if own is not None else None
    started = Started(
        resources,
        str(manager),
        state_dir,
        supervisor,
        access,
        member,
        starts_etcd=own is not None and own.first,
        without_etcd=without,
    )
    from taskd.agent.run.launcher import launch

    try:
        return launch(chosen, started)
    finally:
        if supervisor is not None:
            supervisor.kill()
        if listener is not None:
            listener.close()
        if without is not None and without.listener is not None:
            without.listener.close()
        claim.close()


def _own_etcd(
    chosen: Plan, folders: tuple[str, str], listen_host: str, is_first: bool
) -> WithEtcd | WithoutEtcd | None:
    """Whether the job has an etcd of its own. None: that was never a question."""
    if not chosen.starts_etcd and not chosen.chooses_etcd:
        return None
    from taskd.agent.run import etcd_choice

    return etcd_choice.decide(chosen, folders, listen_host, first=is_first, say=say)


def _keeper(
    chosen: Plan, etcd: WithEtcd | WithoutEtcd | None
) -> tuple[Plan, OwnEtcd | None, WithoutEtcd | None]:
    if etcd is None:
        return chosen, None, None
    from taskd.agent.run import own_etcd

    if not isinstance(etcd, own_etcd.WithEtcd):
        return replace(chosen, etcd=""), None, etcd
    return replace(chosen, etcd=plan.OWN_ETCD), own_etcd.start(chosen, etcd, say), None


def _etcd(chosen: Plan) -> EtcdAccess | None:
    """Where the job's state is kept; None: on the first node."""
    if chosen.etcd in ("", plan.OWN_ETCD):
        return None
    from taskd.clusterd.etcd.etcd_settings import EtcdAccess, addresses, settings

    return EtcdAccess(addresses(chosen.etcd), settings())


def _own_ports(chosen: Plan, listen_host: str) -> tuple[socket.socket, Address]:
    """This node's own store and the address of its manager, on the usual ports if they are free."""
    from taskd.bus.liveness_port import own_address

    assert chosen.master_port is not None, "with several nodes the store's port is fixed"
    host = chosen.local_addr or own_address(Address(chosen.master_addr, chosen.master_port))
    # The usual ports belong to node 0, if it is on this machine.
    shared = rendezvous.is_local_address(chosen.master_addr)
    listener = _listen_near(listen_host, None if shared else chosen.master_port)
    manager = _listen_near(listen_host, None if shared else chosen.manager_port)
    port = manager.getsockname()[1]
    manager.close()
    return listener, Address(host, port)


def _listen_near(host: str, port: int | None) -> socket.socket:
    try:
        return plan.listen(host, port)
    except SettingsError:
        return plan.listen(host, None)  # another node of the job runs on this machine


def _listener(chosen: Plan, listen_host: str) -> socket.socket | None:
    """The store's socket if this is the first node.

    Among nodes that draw their rank, the first launcher on the endpoint's machine is node 0.
    """
    if not chosen.draws_rank:
        return plan.listen(listen_host, chosen.master_port) if chosen.node == 0 else None
    if chosen.is_first_node is not None:
        return plan.listen(listen_host, chosen.master_port) if chosen.is_first_node else None
    if not rendezvous.is_local_address(chosen.master_addr):
        return None
    try:
        return plan.listen(listen_host, chosen.master_port)
    except SettingsError:
        return None


def _draw_node_rank(chosen: Plan) -> tuple[Plan, Claim]:
    assert chosen.master_port is not None, "with several nodes the store's port is fixed"
    endpoint = chosen.master_addr, chosen.master_port
    first = max(chosen.node, 1)
    name, timeout_s = chosen.local_addr, chosen.join_timeout_s
    node, claim = node_ranks.draw_in_process(endpoint, chosen.job, first, name, timeout_s)
    spare = ", a spare" if node >= chosen.nodes else ""
    say(f"this is node {node} of job {chosen.job}{spare}")
    return chosen.with_node(node), claim


def _warn_if_open(chosen: Plan) -> None:
    """Say so if any machine can join the job, even if that is intended."""
    if chosen.nodes > 1 and not chosen.token:
        say(
            "--insecure: any process that can reach this machine can run code in the job: set "
            "TASKD_TOKEN to the same secret on all nodes instead"
        )


def _warn_if_node_zero_is_special(chosen: Plan) -> None:
    """Of two nodes: more choose together, and node 0 says what they have chosen."""
    if chosen.nodes == 2 and chosen.etcd_off != plan.NO_ETCD_OPTION:
        from taskd.agent.etcd_member.etcd_binary import COST

        say(
            f"node 0 keeps the job's state: {COST}. With a spare or `taskd run --witness` on a "
            "third machine, start all of them with --etcd own; or name an etcd with --etcd"
        )


def _manager(
    chosen: Plan, listen_host: str, here: Address, access: EtcdAccess | None, run_dir: str
) -> Supervisor:
    listen = str(Address(listen_host, here.port))
    command: tuple[str, ...] = (
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
        "--show-incidents",
        *(["--precheck"] if chosen.precheck else []),
        *([] if _has_backup_nic(chosen) else ["--no-backup-nic"]),
        *([f"--metrics={chosen.metrics}"] if chosen.metrics else []),
        *([f"--otlp={chosen.otlp}"] if chosen.otlp else []),
    )
    if access is not None:
        etcd = f"--etcd={','.join(access.addresses)}"
        command += (etcd, f"--node={chosen.node}", f"--advertise={here}")
    if chosen.nodes > 1:
        command += ("--rescheduling",)  # a lost node's launcher may be started again
    env = {"TASKD_LOG_LEVEL": "ERROR", **base_environment(chosen), "TASKD_TOKEN": chosen.token}
    if access is not None:
        env |= access.environment()
    from taskd.agent.run.summary import SUMMARY, has_ended

    summary = Path(chosen.state_dir or run_dir) / SUMMARY
    if has_ended(summary):
        summary.unlink()  # left by an earlier run; that of a launcher that died is continued
    return Supervisor("manager", "taskd.manager", command, env, is_over=lambda: has_ended(summary))


def _has_backup_nic(chosen: Plan) -> bool:
    """Ascend's own package switches links without the names of interfaces."""
    nics = ",".join(chosen.nics) or environ.get("TASKD_NICS", "")
    return "," in nics or find_spec("torch_npu") is not None


def _set_up_log() -> None:
    """Log little, and to stderr: what a person must know is written by `say`."""
    level = environ.get("TASKD_LOG_LEVEL", "").upper()
    logging.basicConfig(level=level or "WARNING", format="taskd: %(message)s")
    if not level:
        # Connections come and go while everything starts.
        logging.getLogger("taskd.bus").setLevel(logging.ERROR)


def say(text: str) -> None:
    """Write to the person who started us."""
    sys.stderr.write(f"taskd: {text}\n")
    sys.stderr.flush()
