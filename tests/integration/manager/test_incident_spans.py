"""Incidents as OpenTelemetry spans: what a real collector's endpoint gets from the real SDK."""

from __future__ import annotations

import gzip
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from taskd.errors import SettingsError
from taskd.manager.reports import incident_spans
from taskd.manager.reports.incident_spans import SpanExport, span_of
from taskd.wire._pb import control_pb2 as control
from tests.integration.run.run_job import run, script
from tests.integration.run.test_incidents import TRAIN

WAIT_S = 60.0
EVIDENCE = "x" * 10_000_000 + "the end"


def report(outcome: str = "recovered") -> control.IncidentReport:
    return control.IncidentReport(
        job="llama",
        incident=7,
        strategy="recover-in-place",
        outcome=outcome,
        because="4 ranks train",
        phases=[
            control.Phase(name="seen", at_unix_ms=1_000),
            control.Phase(name="stopped", at_unix_ms=1_040, took_ms=40.0),
            control.Phase(name="step", at_unix_ms=1_500, took_ms=460.0),
        ],
        faults=[control.IncidentFault(rank=2, node=1, cause="exited", evidence=EVIDENCE)],
    )


@contextmanager
def collector() -> Iterator[tuple[str, queue.Queue[tuple[str, bytes]]]]:
    """An HTTP server that keeps what is posted."""
    got: queue.Queue[tuple[str, bytes]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.put((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_collector_gets_an_incident_with_its_phases_and_faults() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, got):
        export = SpanExport(url, "llama")
        export.send(report())
        export.flush()
        path, body = got.get(timeout=WAIT_S)
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (names["service.name"], names["taskd.job"]) == ("taskd", "llama")
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    root = spans["taskd.incident"]
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (10**9, 1_500_000_000)
    values = {each.key: each.value for each in root.attributes}
    assert values["taskd.incident"].int_value == 7
    assert [one.int_value for one in values["taskd.ranks"].array_value.values] == [2]
    assert values["taskd.outcome"].string_value == "recovered"
    (event,) = root.events
    assert {e.key: e.value for e in event.attributes}["taskd.evidence"].string_value.endswith("end")
    for name, begin_ms, end_ms in (("stopped", 1_000, 1_040), ("step", 1_040, 1_500)):
        child = spans[f"taskd.incident.{name}"]
        assert child.parent_span_id == root.span_id
        assert child.start_time_unix_nano == begin_ms * 10**6
        assert child.end_time_unix_nano == end_ms * 10**6


def killed_once(folder: Path, url: str) -> tuple[Any, dict[str, Any]]:
    """A job of three ranks, of which rank 1 is killed; and the incident as its summary has it."""
    state = folder / "state"
    words = ["--nproc-per-node=3", f"--otlp={url}", "--job-id=llama", f"--state-dir={state}"]
    ended = run(folder, *words, script(folder, TRAIN), "1")
    assert ended.code == 0, ended.err
    (incident,) = json.loads((state / "summary.json").read_text())["incidents"]
    return ended, incident


def test_killed_rank_of_a_real_job_arrives_as_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    began_ns = time.time_ns()
    with collector() as (url, got):
        _, incident = killed_once(tmp_path, url)
    bodies = [got.get_nowait() for _ in range(got.qsize())]
    assert {path for path, _ in bodies} == {"/v1/traces"}
    spans = [
        span
        for _, body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "taskd.incident"
    values = {each.key: each.value for each in root.attributes}
    assert values["taskd.job"].string_value == "llama"
    assert values["taskd.outcome"].string_value == "recovered"
    assert values["taskd.strategy"].string_value == "recover-in-place"
    assert 1 in [one.int_value for one in values["taskd.ranks"].array_value.values]
    causes = [{e.key: e.value.string_value for e in event.attributes} for event in root.events]
    assert any("signal 9" in each["taskd.evidence"] for each in causes), causes
    children = sorted(
        (span for span in spans if span.parent_span_id),
        key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano),
    )
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert {span.trace_id for span in spans} == {root.trace_id}
    parts = {f"{root.name}.{part}" for part in incident["parts_ms"]}
    assert {"taskd.incident.stopped", "taskd.incident.step"} <= parts
    assert {span.name for span in children} == parts
    assert began_ns < root.start_time_unix_nano < root.end_time_unix_nano < time.time_ns()
    assert all(a.end_time_unix_nano <= b.start_time_unix_nano for a, b in pairwise(children))


def test_collector_that_never_answers_does_not_hold_a_real_job(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, incident = killed_once(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert incident["outcome"] == "recovered"


def test_collector_that_is_away_disturbs_nothing() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with collector() as (url, _):
        pass
    export = SpanExport(url, "llama")
    export.send(report())
    export.send(control.IncidentReport(job="llama", incident=8))
    export.flush()


def test_failed_recovery_is_an_error_and_long_evidence_is_cut() -> None:
    span = span_of(report("ended"))
    assert span is not None
    assert span.failed == "4 ranks train"
    assert len(str(span.events[0]["taskd.evidence"])) == incident_spans.MOST_TEXT
    recovered = span_of(report())
    assert recovered is not None
    assert recovered.failed == ""


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_spans, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"taskd\[otel\]"):
        SpanExport("http://127.0.0.1:4318", "llama")
