from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import taskd
from taskd import doctor
from taskd.agent.run import torch_check
from taskd.ascend import mspti
from taskd.doctor import Finding, Verdict
from taskd.runtime.torch_versions import TESTED


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


def findings(text: str) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in json.loads(text)["findings"]}


def test_json_report_of_a_healthy_machine(tmp_path: Path) -> None:
    done = run("doctor", "--json", TASKD_LOG_PATH=str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    found = findings(done.stdout)
    assert json.loads(done.stdout)["version"] == taskd.__version__
    for subject in ("python", "grpcio", "protobuf", "fork", "pidfd", "shared memory", "torch"):
        assert found[subject]["verdict"] == "ok", found[subject]
    assert found["log directory"]["value"] == str(tmp_path / "log")
    assert not (tmp_path / "log").exists()
    for finding in found.values():
        assert bool(finding["because"]) == bool(finding["remedy"]) == (finding["verdict"] != "ok")


def test_text_report_lists_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding("disk", Verdict.BROKEN, "full", "nothing can be saved", "free some space")
    monkeypatch.setattr(
        doctor, "examine", lambda: iter([Finding("cpu", Verdict.FINE, "x"), broken])
    )
    assert doctor.run(Namespace(json=False)) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "ok       cpu   x",
        "broken   disk  full",
        "               nothing can be saved",
        "               -> free some space",
        "",
        "TaskD does not work here: see `broken` above.",
    ]


def test_port_in_use_is_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = doctor._port(port, "the manager")
        assert taken.verdict is Verdict.LIMITED
        assert "the manager cannot listen on it" in taken.because
    assert doctor._port(port, "the manager").verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (None, Verdict.ABSENT),
        ("2.5.1", Verdict.LIMITED),
        ("nightly", Verdict.LIMITED),
        (f"{TESTED[0]}+cu124", Verdict.FINE),
        (f"{TESTED[-1]}+cpu", Verdict.FINE),
        ("2.99.0", Verdict.LIMITED),
    ],
)
def test_torch_version_decides_the_verdict(
    found: str | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: found)
    monkeypatch.setattr(torch_check, "TRIAL", "")
    assert doctor._torch().verdict is verdict


def test_torch_with_unexpected_internals_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_check, "TRIAL", "raise SystemExit('no split_group')")
    finding = doctor._torch()
    assert finding.verdict is Verdict.LIMITED
    assert finding.because == "`taskd.torch.init()` refuses it: no split_group"


@pytest.mark.parametrize(
    "name", ["grpcio", "protobuf", "cryptography", "pyyaml", "grpcio-health-checking"]
)
def test_oldest_accepted_version_is_that_of_the_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.0")
    findings = {each.subject: each for each in (*doctor._basics(), *doctor._frameworks())}
    (needed,) = {
        version
        for text in metadata.requires("taskd") or ()
        if re.match(rf"{name}[^\w-]", text)
        for version in re.findall(r">=([\d.]+)", text)
    }
    assert f"too old, {needed} or newer" in findings[name].because


def test_package_version_decides_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"old": "4.24.4", "new": "4.25.0rc1"}.get)
    assert doctor._package("new", (4, 25), "x").verdict is Verdict.FINE
    assert doctor._package("old", (4, 25), "x").verdict is Verdict.LIMITED
    assert doctor._package("old", (4, 25), "x", Verdict.BROKEN).verdict is Verdict.BROKEN
    assert doctor._package("none", (4, 25), "x", Verdict.BROKEN).verdict is Verdict.BROKEN
    assert doctor._package("none", (), "x").verdict is Verdict.ABSENT


def test_unusable_log_directory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "file/below", "link"):
        monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / name))
        assert doctor._log_directory().verdict is Verdict.LIMITED, name
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "new" / "deep"))
    assert doctor._log_directory().verdict is Verdict.FINE
    monkeypatch.setenv("TASKD_STD_LOG_LEVEL", "LOUD")
    assert "TASKD_STD_LOG_LEVEL" in doctor._log_directory().because


def test_mspti_is_found_in_trusted_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / mspti.NAME).touch()
    monkeypatch.setattr(mspti, "CANN_PATHS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert doctor._mspti().verdict is Verdict.ABSENT, "any user could have put a file there"
    monkeypatch.setattr(mspti, "CANN_PATHS", (tmp_path / mspti.NAME,))
    assert doctor._mspti().value == str(tmp_path / mspti.NAME)


def test_failed_attempt_is_broken_or_limited() -> None:
    def fails() -> str:
        raise OSError("Function not implemented")

    assert doctor._tried("pidfd", fails, "x").verdict is Verdict.BROKEN
    assert doctor._tried("fork", fails, "x", basic=False).verdict is Verdict.LIMITED


def test_version_option_prints_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"taskd {taskd.__version__}\n")
