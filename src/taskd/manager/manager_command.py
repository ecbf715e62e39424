"""`taskd manager` and `python -m taskd.manager`: run the manager as a separate process."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from taskd.config import environ, load
from taskd.core.manager.operation_progress import OperationsConfig
from taskd.core.manager.states import UNLIMITED_RESTARTS, JobConfig
from taskd.core.manager.watch.silent_nodes import SilenceConfig
from taskd.core.manager.watch.stragglers import StragglerConfig
from taskd.core.manager.watch.wait_bounds import LivenessConfig
from taskd.errors import SettingsError, TaskdError
from taskd.manager.main import serve
from taskd.manager.settings import PORT, ManagerConfig, is_mindspore, switch_file
from taskd.model.strategies import parse_strategies
from taskd.runtime.limits.fd_limit import raise_fd_limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    host = environ.get("POD_IP", "127.0.0.1")
    parser.add_argument("--job-id", default=environ.get("MINDX_TASK_ID", "job"))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--procs-per-node", type=int, default=1)
    parser.add_argument(
        "--max-restarts", type=int, default=UNLIMITED_RESTARTS, help="default: no limit"
    )
    parser.add_argument("--listen", default=f"{host}:{PORT}", help="host:port; port 0: any")
    parser.add_argument("--clusterd", default="embedded", help="host:port, or `embedded`")
    parser.add_argument("--etcd", default="", help="host:port,…: one of several managers leads")
    parser.add_argument("--node", type=int, default=0, help="the node of this manager (--etcd)")
    parser.add_argument("--newest-epoch", type=int, default=0, help="that this node knows (--etcd)")
    parser.add_argument("--advertise", default="", help="host:port for other nodes (--etcd)")
    parser.add_argument("--strategies", default="", help="comma-separated list; empty: all")
    parser.add_argument("--state-dir", type=Path, help="journal and summary")
    parser.add_argument("--plugin-dir", type=Path)
    parser.add_argument("--ready-file", type=Path, help="written once it listens")
    parser.add_argument("--ready-fd", type=int, help="written to once it listens")
    parser.add_argument("--dump-dir", default="taskd-dump")
    parser.add_argument("--join-timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--profiling-switch", default=switch_file())
    parser.add_argument(
        "--precheck", action="store_true", help="stress-test all ranks after their first step"
    )
    parser.add_argument(
        "--no-backup-nic", action="store_true", help="refuse orders to switch network links"
    )
    parser.add_argument("--metrics", default="", help="host:port to serve Prometheus on")
    parser.add_argument("--otlp", default="", help="http://host:4318 of an OpenTelemetry collector")
    parser.add_argument(
        "--show-incidents", action="store_true", help="write a line about each one that is over"
    )
    parser.add_argument("--rescheduling", action="store_true", help="lost nodes may come back")


def config_of(args: argparse.Namespace) -> ManagerConfig:
    try:
        job = replace(
            load(JobConfig, prefix="TASKD_MANAGER"),
            nodes=args.nodes,
            ranks_per_node=args.procs_per_node,
            max_restarts=args.max_restarts,
            dump_dir=args.dump_dir,
            join_timeout_s=args.join_timeout,
            rescheduling=args.rescheduling,
            mindspore=is_mindspore(environ),
        )
        strategies = parse_strategies(args.strategies, "--strategies") if args.strategies else ()
    except ValueError as error:
        raise SettingsError([str(error)]) from None
    return ManagerConfig(
        job_id=args.job_id,
        listen=args.listen,
        token=environ.get("TASKD_TOKEN", ""),
        clusterd=args.clusterd,
        clusterd_token=environ.get("TASKD_CLUSTERD_TOKEN", ""),
        clusterd_token_file=environ.get("TASKD_CLUSTERD_TOKEN_FILE", ""),
        etcd=args.etcd,
        node=args.node,
        newest_epoch=args.newest_epoch,
        advertise=args.advertise or args.listen,
        strategies=strategies,
        state_dir=args.state_dir,
        plugin_dir=args.plugin_dir,
        ready_file=args.ready_file,
        ready_fd=args.ready_fd,
        profiling_switch=args.profiling_switch,
        liveness=load(LivenessConfig),
        silence=load(SilenceConfig, prefix="TASKD_SILENCE"),
        stragglers=load(StragglerConfig, prefix="TASKD_STRAGGLER"),
        operations=load(OperationsConfig, prefix="TASKD_OPERATIONS"),
        precheck=args.precheck,
        backup_nic=not args.no_backup_nic,
        metrics=args.metrics,
        otlp=args.otlp,
        show_incidents=args.show_incidents,
        job=job,
    )


def run(args: argparse.Namespace) -> int:
    raise_fd_limit()
    return serve(config_of(args))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m taskd.manager", description=__doc__)
    add_arguments(parser)
    level = environ.get("TASKD_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
    try:
        return run(parser.parse_args(argv))
    except TaskdError as error:
        sys.stderr.write(f"taskd manager: {error}\n")
        return 1
