"""Metrics over real HTTP: what Prometheus gets, and what strangers get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from taskd.errors import SettingsError
from taskd.runtime import metrics
from taskd.runtime.metrics import Metric, Sample, one, render
from tests import ROOT

DASHBOARD = ROOT / "deploy/grafana-dashboard.json"


def look() -> Iterable[Metric]:
    yield one("taskd_step", "The step.", 7, job="a")
    yield Metric("taskd_odd", "Odd\nhelp", (Sample(0.5, {"note": 'a "b"\\\n'}),), "counter")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def served(*requests: bytes) -> list[bytes]:
    async with metrics.serve("127.0.0.1:0", look) as port:
        return [await ask(port, request) for request in requests]


def test_the_text_format_is_escaped() -> None:
    text = render(look())
    assert 'taskd_step{job="a"} 7\n' in text
    assert "# HELP taskd_odd Odd\\nhelp\n# TYPE taskd_odd counter\n" in text
    assert 'taskd_odd{note="a \\"b\\"\\\\\\n"} 0.5\n' in text


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
    ],
)
def test_requests_good_and_bad(request_line: bytes, status: bytes) -> None:
    (told,) = asyncio.run(served(request_line))
    assert told.split()[1] == status
    has_body = b"taskd_step" in told
    assert has_body == request_line.startswith(b"GET /metrics")


def test_too_long_a_head_is_dropped_and_the_next_is_served() -> None:
    dropped, told = asyncio.run(served(b"GET /" + b"x" * 100_000, b"GET /metrics HTTP/1.1\r\n\r\n"))
    assert dropped == b""
    assert b"taskd_step" in told


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "256.0.0.1:1"])
def test_an_address_that_cannot_be_had_is_a_setting_to_mend(address: str) -> None:
    async def try_it() -> None:
        async with metrics.serve(address, look):
            pass

    with pytest.raises(SettingsError):
        asyncio.run(try_it())


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    source = Path(metrics.__file__).parents[1]
    told = (source / "manager/job_metrics.py").read_text() + (
        source / "clusterd/cluster_metrics.py"
    ).read_text()
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {
        word
        for expr in asked
        for word in expr.replace("(", " ").replace("{", " ").replace("[", " ").split()
        if word.startswith("taskd_")
    }
    assert len(names) > 8
    assert not {name for name in names if f'"{name}"' not in told}
