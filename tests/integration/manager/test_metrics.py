"""Metrics over real HTTP: what Prometheus gets, whatever other clients do."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from taskd.errors import SettingsError
from taskd.runtime import metrics
from taskd.runtime.clock import monotonic
from taskd.runtime.limits.waiting_connections import MOST_WAITING
from taskd.runtime.metrics import Metric, Sample, one
from tests import ROOT

DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
ALERTS = ROOT / "deploy/prometheus-alerts.yaml"
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
TIMEOUT_S = 20.0


def look() -> Iterable[Metric]:
    yield one("taskd_step", "The step.", 7, job="a")
    samples = (Sample(0.5, {"note": 'a "b"\\\n'}),)
    yield Metric("taskd_odd_total", "Odd\nhelp", samples, "counter")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def served(*requests: bytes) -> list[bytes]:
    async with metrics.serve("127.0.0.1:0", look) as port:
        return [await ask(port, request) for request in requests]


def test_scraper_gets_names_types_and_escaped_labels() -> None:
    (reply,) = asyncio.run(served(SCRAPE))
    text = reply.decode()
    assert text.startswith("HTTP/1.0 200")
    assert 'taskd_step{job="a"} 7.0\n' in text
    assert "# HELP taskd_odd_total Odd\\nhelp\n# TYPE taskd_odd_total counter\n" in text
    assert 'taskd_odd_total{note="a \\"b\\"\\\\\\n"} 0.5\n' in text


@pytest.mark.parametrize(
    "request_line",
    [
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01 hello\r\n\r\n",
        b"x" * 100_000 + b"\r\n\r\n",
    ],
)
def test_bad_request_gets_no_metrics_and_the_next_is_served(request_line: bytes) -> None:
    bad, good = asyncio.run(served(request_line, SCRAPE))
    assert b"taskd_step" not in bad
    assert b"taskd_step" in good


def test_slow_connections_do_not_shut_out_a_scraper() -> None:
    async def main() -> bytes:
        async with metrics.serve("127.0.0.1:0", look) as port:
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for _, writer in slow:
                writer.write(b"GET /met")
            try:
                return await ask(port, SCRAPE)
            finally:
                for _, writer in slow:
                    writer.close()

    assert b"taskd_step" in asyncio.run(main())


def test_dripping_connections_do_not_take_all_threads() -> None:
    async def main() -> bytes:
        async with metrics.serve("127.0.0.1:0", look) as port:
            before = threading.active_count()
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            for _, writer in slow:
                writer.write(b"GET /met")
            try:
                reply = await ask(port, SCRAPE)
                deadline = monotonic() + TIMEOUT_S
                while threading.active_count() - before > MOST_WAITING + 1:
                    assert monotonic() < deadline
                    await asyncio.sleep(0)
                return reply
            finally:
                for _, writer in slow:
                    writer.close()

    assert b"taskd_step" in asyncio.run(main())


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "256.0.0.1:1"])
def test_invalid_address_is_a_settings_error(address: str) -> None:
    async def main() -> None:
        async with metrics.serve(address, look):
            pass

    with pytest.raises(SettingsError):
        asyncio.run(main())


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with metrics.serve("127.0.0.1:0", look):
            pass

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"pip install 'taskd\[metrics\]'"):
        asyncio.run(main())


def test_dashboard_and_alerts_use_all_metrics_and_no_others() -> None:
    source = Path(metrics.__file__).parents[1]
    code = (source / "manager/reports/job_metrics.py").read_text() + (
        source / "clusterd/cluster_metrics.py"
    ).read_text()
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert all({"summary", "action"} == set(rule["annotations"]) for rule in rules)
    asked += [rule["expr"] for rule in rules]
    names = {name for expr in asked for name in re.findall(r"\btaskd_\w+", expr)}
    assert len(names) > 8
    assert not {name for name in names if f'"{name}"' not in code}
    offered = set(re.findall(r'"(taskd_[a-z_]+)"', code))
    assert offered <= names, "each metric is shown somewhere"
