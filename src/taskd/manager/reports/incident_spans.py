"""Closed incidents as OpenTelemetry spans, for the tracing that people already have.

One span per incident with one child per phase, sent by OTLP over HTTP. The SDK (extra
`taskd[otel]`) is loaded only if it is wanted. It exports in a thread of its own with a bounded
queue: a collector that is away costs the manager nothing but the spans.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from taskd.errors import SettingsError
from taskd.version import __version__
from taskd.wire._pb import control_pb2 as control

log = logging.getLogger(__name__)

PATH = "/v1/traces"
FLUSH_S = 2.0
"""How long the end of a job may be delayed by spans that are not sent yet."""
MOST_TEXT = 2_000
NAME = "taskd.incident"

Value = str | int | float | bool | list[int]


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin_ms: int
    end_ms: int
    attributes: dict[str, Value] = field(default_factory=dict)
    events: tuple[dict[str, Value], ...] = ()
    failed: str = ""
    children: tuple[Span, ...] = ()


def span_of(report: control.IncidentReport) -> Span | None:
    """None: the report has no times."""
    if not report.phases:
        return None
    children = tuple(
        Span(f"{NAME}.{after.name}", before.at_unix_ms, max(before.at_unix_ms, after.at_unix_ms))
        for before, after in pairwise(report.phases)
    )
    return Span(
        NAME,
        report.phases[0].at_unix_ms,
        max(phase.at_unix_ms for phase in report.phases),
        {
            "taskd.job": report.job,
            "taskd.incident": report.incident,
            "taskd.strategy": report.strategy,
            "taskd.outcome": report.outcome,
            "taskd.because": report.because[:MOST_TEXT],
            "taskd.ranks": sorted({fault.rank for fault in report.faults}),
            "taskd.nodes": sorted({fault.node for fault in report.faults if fault.node >= 0}),
        },
        tuple(_event(fault) for fault in report.faults),
        "" if report.outcome in ("recovered", "superseded", "restarted") else report.because,
        children,
    )


def _event(fault: control.IncidentFault) -> dict[str, Value]:
    return {
        "taskd.rank": fault.rank,
        "taskd.node": fault.node,
        "taskd.host": fault.host,
        "taskd.cause": fault.cause,
        "taskd.evidence": fault.evidence[-MOST_TEXT:],
    }


class SpanExport:
    """Raises SettingsError unless the SDK is installed."""

    def __init__(self, endpoint: str, job: str) -> None:
        missing = [name for name in ("opentelemetry.sdk", "opentelemetry.exporter") if _lacks(name)]
        if missing:
            raise SettingsError([f"--otlp needs {missing[0]}: pip install 'taskd[otel]'"])
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        address = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(address if address.endswith(PATH) else f"{address}{PATH}")
        names = {"service.name": "taskd", "service.version": __version__, "taskd.job": job}
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("taskd", __version__)

    def send(self, report: control.IncidentReport) -> None:
        """Returns at once. A problem with a span never reaches the manager."""
        try:
            if (span := span_of(report)) is not None:
                self._send(span, None)
        except Exception as error:  # noqa: BLE001 - tracing must never disturb a recovery
            log.warning("incident %d is not traced: %s", report.incident, error)

    def _send(self, span: Span, parent: Any) -> None:
        from opentelemetry import trace

        context = None if parent is None else trace.set_span_in_context(parent)
        sent = self._tracer.start_span(
            span.name, context, attributes=span.attributes, start_time=_ns(span.begin_ms)
        )
        for event in span.events:
            sent.add_event("fault", event, _ns(span.begin_ms))
        if span.failed:
            sent.set_status(trace.StatusCode.ERROR, span.failed[:MOST_TEXT])
        self._send_all(span.children, sent)
        sent.end(_ns(span.end_ms))

    def _send_all(self, spans: Iterable[Span], parent: Any) -> None:
        for span in spans:
            self._send(span, parent)

    def flush(self) -> None:
        """Blocks for at most FLUSH_S, also if the collector does not answer."""
        thread = threading.Thread(target=self._provider.force_flush, daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _lacks(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _ns(unix_ms: int) -> int:
    return unix_ms * 1_000_000
