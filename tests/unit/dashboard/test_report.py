from __future__ import annotations

import json
import re

from taskd.dashboard import report
from taskd.dashboard.sign_in import STATIC
from taskd.wire._pb import control_pb2 as pb
from tests.unit.dashboard.history import HOSTILE, History, status


def data_in(page: str) -> object:
    match = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_report_contains_the_incidents_and_loads_nothing() -> None:
    history = History()
    history.recovery()
    history.report(1)
    data = report.data_of("job", history.lines, 0, status())
    page = report.page(data)
    assert data_in(page) == json.loads(json.dumps(data))
    assert data["incidents"][0]["title"] == "rank 2 exited: signal 9"
    assert not re.search(r"(src|href)=\"(?!#)", page), "nothing is loaded from elsewhere"
    assert not re.search(r"\bimport\b.* from |^export ", page, re.MULTILINE)


def test_hostile_names_and_evidence_cannot_leave_the_data() -> None:
    history = History()
    history.recovery()
    evidence = f"{HOSTILE}</script><!-- \u2028 \ud800"
    history.lines[0].because = HOSTILE
    data = report.data_of(HOSTILE, history.lines, 0)
    data["incidents"][0]["faults"][0]["evidence"] = evidence
    page = report.page(data)
    assert page.count("<script") == 2
    assert "<img" not in page
    assert data_in(page) == json.loads(json.dumps(data))


def test_names_of_the_joined_modules_do_not_collide() -> None:
    declared = re.findall(
        r"^(?:function|const|let|class) (\w+)", report.script_of(report.MODULES), re.MULTILINE
    )
    assert len(declared) == len(set(declared))
    imported = set(re.findall(r'from "\./(\S+?)"', "".join(map(read, report.MODULES))))
    assert imported <= set(report.MODULES)


def read(name: str) -> str:
    return (STATIC / name).read_text()


def test_long_evidence_is_cut_at_its_beginning() -> None:
    history = History()
    history.recovery()
    history.report(1, faults=[pb.IncidentFault(rank=2, evidence="x" * 5_000_000 + "end")])
    data = report.data_of("job", history.lines, 0)
    evidence = data["incidents"][0]["faults"][0]["evidence"]
    assert len(evidence) == report.MOST_EVIDENCE
    assert evidence.endswith("end")


def test_job_without_history() -> None:
    assert report.data_of("job", [], 0)["incidents"] == []


def test_no_module_writes_html() -> None:
    for path in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", read(path.name)
        )


def test_vendored_files_are_those_of_the_registry() -> None:
    import hashlib

    notes = (STATIC / "vendor" / "README.md").read_text()
    for name in ("uPlot.esm.js", "uPlot.min.css", "uPlot.LICENSE"):
        digest = hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest()
        assert digest in notes
