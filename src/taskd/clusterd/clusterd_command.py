"""The command `taskd clusterd`: the server as its own process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.bus.security import Tls
from taskd.clusterd.auth import TokenFile
from taskd.clusterd.main import ServerConfig, serve
from taskd.config import environ
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.errors import SettingsError
from taskd.model.strategies import LADDER, parse_strategies
from taskd.runtime.limits.fd_limit import raise_fd_limit
from taskd.runtime.plain_text import OneLineFormatter

if TYPE_CHECKING:
    from taskd.clusterd.etcd.etcd_replica import EtcdConfig
    from taskd.clusterd.kubernetes.replica import KubernetesConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        default="",
        help="host:port (default: 0.0.0.0:8899 with --tokens or --tls-ca, else 127.0.0.1:8899)",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="the journal file: all decisions and all states (not with --etcd or --cluster)",
    )
    parser.add_argument(
        "--etcd",
        metavar="HOST:PORT,…",
        help="keep the state of all jobs in this etcd: several clusterds share it, and one leads",
    )
    parser.add_argument(
        "--etcd-prefix", default="", help="prefix of all keys in etcd (default: /taskd/clusterd)"
    )
    parser.add_argument("--cluster-dir", type=Path, help="a directory of cluster objects (YAML)")
    parser.add_argument(
        "--cluster",
        choices=["kubernetes"],
        help="the cluster that this process runs in; it also keeps the state of all jobs",
    )
    parser.add_argument(
        "--probes", default="", help="host:port of /healthz and /readyz (with --cluster)"
    )
    parser.add_argument(
        "--tls",
        nargs=2,
        metavar=("KEY", "CERTIFICATE"),
        help="use TLS, with this private key and certificate (PEM files)",
    )
    parser.add_argument(
        "--tls-ca", default="", help="clients must present a certificate of this authority"
    )
    parser.add_argument(
        "--tokens", type=Path, help="file with one `operator T`, `job:ID T` or `secret S` per line"
    )
    parser.add_argument(
        "--delete-pods",
        action="store_true",
        help="delete pods that must be replaced, if no scheduler does (needs a cluster)",
    )
    parser.add_argument(
        "--public-fault-codes",
        type=Path,
        help="JSON file: who may report public faults, and the level of each code "
        "(default: the usual places of Ascend's ClusterD)",
    )
    parser.add_argument(
        "--strategies", help="strategies of jobs without a declaration (default: all six)"
    )
    parser.add_argument(
        "--no-health", action="store_true", help="do not serve gRPC's health service"
    )
    parser.add_argument(
        "--metrics", default="", help="host:port on which metrics are served for Prometheus"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="set a timeout of the recovery, such as stop_timeout_s=60",
    )


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO)
    # The client of the Kubernetes API logs every request, two per second for the lease alone.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    raise_fd_limit()
    return asyncio.run(_serve(_config(arguments)))


def _config(arguments: argparse.Namespace) -> ServerConfig:
    problems: list[str] = []
    recovery = _recovery(arguments.set, problems)
    strategies = LADDER
    if arguments.strategies is not None:
        try:
            strategies = parse_strategies(arguments.strategies, "--strategies")
        except ValueError as error:
            problems.append(str(error))
    if arguments.tls_ca and not arguments.tls:
        problems.append("--tls-ca needs --tls")
    if arguments.cluster is None and arguments.journal is None and arguments.etcd is None:
        problems.append(
            "--journal is required, unless --etcd or --cluster kubernetes keeps the state"
        )
    if arguments.etcd is not None and arguments.journal is not None:
        problems.append("--journal cannot be combined with --etcd")
    if arguments.etcd_prefix and arguments.etcd is None:
        problems.append("--etcd-prefix needs --etcd")
    for option, value in (
        ("--journal", arguments.journal),
        ("--cluster-dir", arguments.cluster_dir),
        ("--etcd", arguments.etcd),
    ):
        if arguments.cluster is not None and value is not None:
            problems.append(f"{option} cannot be combined with --cluster")
    if arguments.probes and arguments.cluster is None:
        problems.append("--probes needs --cluster")
    if problems:
        raise SettingsError(problems)
    tls = None
    if arguments.tls:
        key, certificate = arguments.tls
        tls = Tls(ca=arguments.tls_ca, server_key=key, server_crt=certificate)
    secured = arguments.tokens is not None or bool(arguments.tls_ca)
    return ServerConfig(
        listen=arguments.listen or ("0.0.0.0:8899" if secured else "127.0.0.1:8899"),
        journal=arguments.journal,
        cluster_dir=arguments.cluster_dir,
        etcd=None if arguments.etcd is None else _etcd(arguments.etcd, arguments.etcd_prefix),
        kubernetes=None if arguments.cluster is None else _kubernetes(arguments.probes),
        tls=tls,
        tokens=None if arguments.tokens is None else TokenFile(arguments.tokens),
        delete_pods=arguments.delete_pods,
        public_codes=arguments.public_fault_codes,
        strategies=strategies,
        health=not arguments.no_health,
        metrics=arguments.metrics,
        recovery=recovery,
    )


def _etcd(addresses: str, prefix: str) -> EtcdConfig:
    from taskd.clusterd.etcd import etcd_replica, etcd_settings

    return etcd_replica.EtcdConfig(
        addresses=etcd_settings.addresses(addresses),
        prefix=prefix.rstrip("/") or etcd_replica.PREFIX,
        settings=etcd_settings.settings(),
    )


def _kubernetes(probes: str) -> KubernetesConfig:
    from taskd.clusterd.kubernetes.replica import KubernetesConfig

    namespace = environ.get("POD_NAMESPACE") or "mindx-dl"
    return KubernetesConfig(namespace=namespace, pod=environ.get("POD_NAME", ""), probes=probes)


def _recovery(settings: list[str], problems: list[str]) -> RecoveryConfig:
    types = {item.name: item.type for item in fields(RecoveryConfig)}
    values: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in types:
            problems.append(
                f"--set {setting}: unknown setting {name!r} (expected one of {', '.join(types)})"
            )
            continue
        try:
            values[name] = int(text) if types[name] == "int" else float(text)
        except ValueError:
            problems.append(f"--set {setting}: invalid number {text!r}")
    try:
        return RecoveryConfig(**values)  # type: ignore[arg-type]
    except ValueError as error:
        problems.append(f"--set: {error}")
        return RecoveryConfig()


async def _serve(config: ServerConfig) -> int:
    """0: stopped by a signal; 1: another replica leads now, and this process must begin again."""
    stop, serving = asyncio.Event(), asyncio.current_task()
    assert serving is not None
    started = False

    def stopped() -> None:
        stop.set()
        if not started:
            serving.cancel()  # a replica that waits until it leads

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped)
    try:
        async with serve(config) as server:
            started = True
            sys.stdout.write(f"clusterd listens on port {server.port}\n")
            sys.stdout.flush()
            if server.leadership is None:
                await stop.wait()
                return 0
            lost = server.leadership.lost
            waits = [asyncio.ensure_future(event.wait()) for event in (stop, lost)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            return 0 if stop.is_set() else 1
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return 0
