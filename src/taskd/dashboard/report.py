"""`taskd replay JOB --html FILE`: the incidents of a job as one file that needs nothing else. Pure.

The file contains the same modules that draw the pages of the dashboard, joined into one script. Its
content policy names the hashes of that script and of the style, so nothing else in it can run, and
it loads nothing. The data is JSON in which no character can end the element that holds it.
"""

from __future__ import annotations

import hashlib
import html
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from taskd.dashboard import incidents, views
from taskd.runtime import json_text
from taskd.version import __version__
from taskd.wire._pb import control_pb2 as pb

STATIC = Path(__file__).parent / "static"
MODULES = ("dom.js", "format.js", "incident.js", "notes.js", "report.js")
MOST_EVIDENCE = 1_000_000
"""Characters of one evidence; of a longer one the end is kept."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="main"></main>
<noscript>This report needs JavaScript. The data is in the element below as JSON.</noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page(data: dict[str, Any]) -> str:
    style, script = (STATIC / "app.css").read_text(), script_of(MODULES)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json_text.dumps(data, ascii_only=True).replace("<", "\\u003c").replace(">", "\\u003e")
    title = html.escape(f"{data['job']} · incidents · TaskD")
    return _PAGE.format(policy=policy, title=title, style=style, script=script, data=text)


def data_of(
    job: str,
    lines: Sequence[pb.HistoryLine],
    now_ms: int,
    status: pb.JobStatus | None = None,
    problem: str = "",
) -> dict[str, Any]:
    """`problem` says what could not be read, if not everything could."""
    found = incidents.read(lines)
    shown = [incidents.shown(found, index) for index in range(len(found))]
    for each in shown:
        for fault in each["faults"]:
            fault["evidence"] = fault["evidence"][-MOST_EVIDENCE:]
    times = [line.at_unix_ms for line in lines if line.at_unix_ms] or [0]
    known = pb.JobStatus(line=pb.JobLine(job=job)) if status is None else status
    return {
        "job": job,
        "version": __version__,
        "written": f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "problem": problem,
        "live": None if status is None else views.job(status, found),
        "beganUnixMs": min(times),
        "endedUnixMs": max(times),
        "because": next((line.because for line in reversed(lines) if line.because), ""),
        "nodes": views.nodes(known, found)["nodes"],
        "notes": incidents.notes(lines),
        "incidents": shown[::-1],
    }


def script_of(names: Sequence[str]) -> str:
    """ES modules as one script: without their imports from each other, and without exports."""
    parts = []
    for name in names:
        text = (STATIC / name).read_text()
        text = re.sub(r"^import .*;\n", "", text, flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    joined = "\n".join(parts)
    assert "</script" not in joined
    return joined


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
