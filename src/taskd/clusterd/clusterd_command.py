"""The command `taskd clusterd`: the server as its own process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from dataclasses import fields
from pathlib import Path

from taskd.bus.security import Tls
from taskd.clusterd.auth import Tokens
from taskd.clusterd.main import ServerConfig, serve
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.errors import SettingsError
from taskd.model.strategies import LADDER, parse_strategies
from taskd.runtime.fd_limit import raise_fd_limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", default="0.0.0.0:8899", help="host:port")
    parser.add_argument(
        "--journal",
        type=Path,
        required=True,
        help="the journal file: all decisions and the state of all jobs",
    )
    parser.add_argument("--cluster-dir", type=Path, help="a directory of cluster objects (YAML)")
    parser.add_argument(
        "--tls",
        nargs=2,
        metavar=("KEY", "CERTIFICATE"),
        help="use TLS; the PEM files of this server",
    )
    parser.add_argument(
        "--tls-ca", default="", help="clients must present a certificate of this authority"
    )
    parser.add_argument(
        "--tokens", type=Path, help="file with one `operator T`, `job:ID T` or `secret S` per line"
    )
    parser.add_argument("--strategies", help="for jobs without a declaration (default: all six)")
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
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    raise_fd_limit()
    asyncio.run(_serve(_config(arguments)))
    return 0


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
    if problems:
        raise SettingsError(problems)
    tls = None
    if arguments.tls:
        key, certificate = arguments.tls
        tls = Tls(ca=arguments.tls_ca, server_key=key, server_crt=certificate)
    return ServerConfig(
        listen=arguments.listen,
        journal=arguments.journal,
        cluster_dir=arguments.cluster_dir,
        tls=tls,
        tokens=None if arguments.tokens is None else Tokens.load(arguments.tokens),
        strategies=strategies,
        health=not arguments.no_health,
        metrics=arguments.metrics,
        recovery=recovery,
    )


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


async def _serve(config: ServerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(config) as server:
        sys.stdout.write(f"clusterd listens on port {server.port}\n")
        sys.stdout.flush()
        await stop.wait()
