"""`taskd dashboard [JOB]`: shows jobs in a browser, from a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

from taskd.clusterd.locate import Place, find, is_withdrawn
from taskd.commands.connection import add_server_arguments, tls_of, user_name
from taskd.errors import SettingsError
from taskd.runtime.address import Address
from taskd.runtime.limits.fd_limit import raise_fd_limit
from taskd.runtime.tokens import ClientToken

DEFAULT = "127.0.0.1:8790"
SHUTDOWN_S = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="show only this job (default: all)")
    parser.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help=f"where to serve the page (default: {DEFAULT}, or a free port if that is taken)",
    )
    parser.add_argument("--tls-cert", default="", help="certificate of the page, for https")
    parser.add_argument("--tls-key", default="", help="private key of that certificate")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve other machines without https: only behind a proxy that encrypts",
    )
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name that browsers use for the page; may be repeated",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    _require_extra()
    raise_fd_limit()
    place = find(arguments.job, arguments.server, arguments.token)
    listener = _listen(arguments)
    with listener:
        host, port = listener.getsockname()[:2]
        secure = bool(arguments.tls_cert)
        dashboard, app = _application(arguments, place, host, secure)
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"{'https' if secure else 'http'}://{Address(shown, port)}"
        what = f"job {arguments.job}" if arguments.job else f"all jobs of {place.address}"
        sys.stderr.write(f"taskd: dashboard of {what}: {url}/login?key={dashboard.key}\n")
        sys.stderr.flush()
        return _serve(app, listener, arguments, dashboard.end_events)


def _require_extra() -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise SettingsError([f"the dashboard needs {needs}: pip install 'taskd[dashboard]'"])


def _listen(arguments: argparse.Namespace) -> socket.socket:
    address = Address.parse(arguments.listen or DEFAULT)
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise SettingsError(["--tls-cert and --tls-key must be given together"])
    if not address.is_loopback and not arguments.tls_cert and not arguments.insecure:
        raise SettingsError(
            [
                f"--listen: {address} is reachable from other machines, and tokens would cross "
                "the network in clear text: give --tls-cert and --tls-key, or --insecure behind "
                "a proxy that encrypts"
            ]
        )
    try:
        return _bound(address)
    except OSError as error:
        if arguments.listen:
            raise SettingsError([f"cannot listen on {address}: {error.strerror}"]) from error
    return _bound(Address(address.host, 0))


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _application(
    arguments: argparse.Namespace, place: Place, host: str, secure: bool
) -> tuple[Any, Any]:
    from taskd.dashboard.clusterd_link import ClusterdLink
    from taskd.dashboard.dashboard import Dashboard
    from taskd.dashboard.page_security import HostNames
    from taskd.dashboard.web_server import application

    tls = tls_of(arguments, place)
    dashboard = Dashboard(
        connect=lambda: ClusterdLink(place.address, tls),
        hosts=HostNames(host, arguments.host_name),
        token=ClientToken(place.token, place.token_file),
        owner=user_name(),
        only_job=arguments.job,
        is_over=lambda job: is_withdrawn(place) and place.job == job,
        secure=secure,
    )
    return dashboard, application(dashboard)


def _serve(
    app: Any,
    listener: socket.socket,
    arguments: argparse.Namespace,
    end_events: Callable[[], None],
) -> int:
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Open streams would otherwise hold up the end, and be cancelled with a traceback."""
            end_events()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.config.ssl is not None:
                following = page_certificate.follow(
                    self.config.ssl, arguments.tls_cert, arguments.tls_key
                )
                self.following = asyncio.create_task(following)

    from taskd.dashboard import page_certificate
    from taskd.dashboard.http_requests import HttpConnection

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=arguments.tls_cert or None,
        ssl_keyfile=arguments.tls_key or None,
    )
    try:
        Server(config).run(sockets=[listener])
    except OSError as error:
        raise SettingsError([f"cannot serve the page: {error.strerror or error}"]) from error
    return 0
