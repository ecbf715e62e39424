"""`taskd clusterd`: the server as a process of its own, until SIGTERM or SIGINT."""

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
from taskd.runtime.fd_limit import make_room


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", default="0.0.0.0:8899", help="host:port")
    parser.add_argument("--journal", type=Path, required=True, help="the file that remembers")
    parser.add_argument("--cluster-dir", type=Path, help="a directory of cluster objects (YAML)")
    parser.add_argument(
        "--tls", nargs=2, metavar=("KEY", "CERTIFICATE"), help="encrypt; PEM files of this server"
    )
    parser.add_argument("--tls-ca", default="", help="clients must show a certificate of this one")
    parser.add_argument("--tokens", type=Path, help="`operator T`, `job:ID T` or `secret S` a line")
    parser.add_argument(
        "--strategies", help="for jobs that nobody describes; all six unless told otherwise"
    )
    parser.add_argument("--no-health", action="store_true", help="without gRPC's health service")
    parser.add_argument("--metrics", default="", help="host:port to serve Prometheus on")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="a wait of the recovery, such as stop_timeout_s=60",
    )


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    make_room()
    asyncio.run(_serve(_config(arguments)))
    return 0


def _config(arguments: argparse.Namespace) -> ServerConfig:
    problems: list[str] = []
    recovery = _recovery(arguments.set, problems)
    strategies = LADDER
    if arguments.strategies is not None:
        try:
            strategies = parse_strategies(arguments.strategies)
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
            problems.append(f"--set {setting}: there is no {name}, but {', '.join(types)}")
            continue
        try:
            values[name] = int(text) if types[name] == "int" else float(text)
        except ValueError:
            problems.append(f"--set {setting}: {text!r} is no number")
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
