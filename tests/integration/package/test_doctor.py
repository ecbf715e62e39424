from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import taskd
from taskd import doctor
from taskd.ascend import mspti
from taskd.doctor import Finding, Verdict


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from taskd.cli import main; sys.exit(main())",
            *arguments,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def findings(told: str) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in json.loads(told)["findings"]}


def test_it_tells_programs_what_works(tmp_path: Path) -> None:
    done = run("doctor", "--json", TASKD_LOG_PATH=str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    told = findings(done.stdout)
    assert json.loads(done.stdout)["version"] == taskd.__version__
    for subject in ("python", "grpcio", "protobuf", "fork", "pidfd", "shared memory", "torch"):
        assert told[subject]["verdict"] == "ok", told[subject]
    assert told["log directory"]["value"] == str(tmp_path / "log")
    assert not (tmp_path / "log").exists()
    for finding in told.values():
        assert bool(finding["because"]) == bool(finding["remedy"]) == (finding["verdict"] != "ok")


def test_it_tells_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding("fire", Verdict.BROKEN, "out", "nothing is warm", "light it")
    monkeypatch.setattr(
        doctor, "examine", lambda: iter([Finding("air", Verdict.FINE, "x"), broken])
    )
    assert doctor.run(Namespace(json=False)) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "ok       air   x",
        "broken   fire  out",
        "               nothing is warm",
        "               -> light it",
        "",
        "The basics do not work: see what is broken above.",
    ]


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = doctor._port(port, "the manager")
        assert taken.verdict is Verdict.LIMITED
        assert "the manager cannot listen there" in taken.because
    assert doctor._port(port, "the manager").verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (None, Verdict.ABSENT),
        ("2.5.1", Verdict.LIMITED),
        ("2.14.0", Verdict.LIMITED),
        ("2.6.0+cu124", Verdict.FINE),
        ("2.13.0+cpu", Verdict.FINE),
    ],
)
def test_versions_of_torch(
    found: str | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: found)
    monkeypatch.setattr(doctor, "SEAM_CHECK", "")
    assert doctor._torch().verdict is verdict


def test_a_torch_whose_inside_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SEAM_CHECK", "raise SystemExit('no split_group')")
    finding = doctor._torch()
    assert finding.verdict is Verdict.LIMITED
    assert finding.because == "ranks are restarted, not repaired in place: no split_group"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"old": "4.24.4", "new": "4.25.0rc1"}.get)
    assert doctor._package("new", (4, 25), "x").verdict is Verdict.FINE
    assert doctor._package("old", (4, 25), "x").verdict is Verdict.LIMITED
    assert doctor._package("old", (4, 25), "x", Verdict.BROKEN).verdict is Verdict.BROKEN
    assert doctor._package("none", (4, 25), "x", Verdict.BROKEN).verdict is Verdict.BROKEN
    assert doctor._package("none", (), "x").verdict is Verdict.ABSENT


def test_log_directories_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "file/below", "link"):
        monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / name))
        assert doctor._log_directory().verdict is Verdict.LIMITED, name
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "new" / "deep"))
    assert doctor._log_directory().verdict is Verdict.FINE
    monkeypatch.setenv("TASKD_STD_LOG_LEVEL", "LOUD")
    assert "TASKD_STD_LOG_LEVEL" in doctor._log_directory().because


def test_a_library_of_ascend_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / mspti.NAME).touch()
    monkeypatch.setattr(mspti, "CANN_PATHS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert doctor._mspti().verdict is Verdict.ABSENT, "anybody could have put it there"
    monkeypatch.setattr(mspti, "CANN_PATHS", (tmp_path / mspti.NAME,))
    assert doctor._mspti().value == str(tmp_path / mspti.NAME)


def test_what_cannot_be_done_says_so() -> None:
    def fails() -> str:
        raise OSError("Function not implemented")

    assert doctor._tried("pidfd", fails, "x").verdict is Verdict.BROKEN
    assert doctor._tried("fork", fails, "x", basic=False).verdict is Verdict.LIMITED


def test_version_of_the_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"taskd {taskd.__version__}\n")
