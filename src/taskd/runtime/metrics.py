"""Metrics in Prometheus' text format, served over the smallest HTTP that its scraper speaks.

`Metric` and `render` are pure; `serve` answers `GET /metrics` with whatever is true at that
moment. The manager and clusterd each say what they know (`manager/job_metrics.py`,
`clusterd/cluster_metrics.py`). No dependency, one connection a scrape, nothing kept between two
of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import isfinite

from taskd.errors import SettingsError

log = logging.getLogger(__name__)

TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE_S = 5.0
"""For one request, from its first byte to the last of its answer."""
MAX_HEAD = 16 * 1024
MAX_OPEN = 32
"""Connections at once; the next is turned away."""


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    help: str
    samples: tuple[Sample, ...]
    kind: str = "gauge"
    """gauge or counter"""


def one(name: str, help: str, value: float, kind: str = "gauge", **labels: str) -> Metric:
    return Metric(name, help, (Sample(value, labels),), kind)


def render(metrics: Iterable[Metric]) -> str:
    lines = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += (f"{metric.name}{_labels(s.labels)} {_number(s.value)}" for s in metric.samples)
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escape(text, quoted=True)}"' for name, text in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) else repr(float(value))


@asynccontextmanager
async def serve(address: str, look: Callable[[], Iterable[Metric]]) -> AsyncIterator[int]:
    """Yields the port. Raises SettingsError when it cannot listen there."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SettingsError([f"--metrics must be HOST:PORT, got {address!r}"])
    open_now = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            if open_now <= MAX_OPEN:
                async with asyncio.timeout(PATIENCE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(respond(head, look))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or never finished the question
        finally:
            open_now -= 1
            writer.close()

    try:
        server = await asyncio.start_server(answer, host or "127.0.0.1", int(port), limit=MAX_HEAD)
    except OSError as error:
        raise SettingsError([f"metrics cannot be served on {address}: {error}"]) from error
    async with server:
        bound = int(server.sockets[0].getsockname()[1])
        log.info("metrics on port %d", bound)
        yield bound


def respond(head: bytes, look: Callable[[], Iterable[Metric]]) -> bytes:
    """One whole HTTP answer to one request's head."""
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _http("400 Bad Request", "this is no HTTP request\n", "text/plain")
    if words[0] not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", "only GET\n", "text/plain")
    if words[1].split(b"?")[0] not in (b"/metrics", b"/"):
        return _http("404 Not Found", "look at /metrics\n", "text/plain")
    return _http("200 OK", render(look()), TYPE, bodiless=words[0] == b"HEAD")


def _http(status: str, text: str, kind: str, bodiless: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bodiless else body)
