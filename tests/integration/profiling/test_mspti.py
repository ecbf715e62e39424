"""Ascend's profiling library in a separate process, through its real interface.

The library is a fake with the vendor's functions and structures, compiled here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from taskd.ascend import mspti
from taskd.model import messages as m
from taskd.model.ids import manager, worker
from tests.integration.bus.bus_nodes import proxy, running_bus, until_delivered
from tests.integration.profiling.test_profiling_worker import STARTED_S, answer_of, running

SOURCE = Path(__file__).with_name("mspti.c")

ASCEND = """
    import sys
    from taskd.api import init_taskd_worker, start_taskd_worker, destroy_taskd_worker
    assert init_taskd_worker(5, 20, "ms") is True
    assert start_taskd_worker() is True
    sys.stdin.readline()
    assert destroy_taskd_worker() is True
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("cann") / mspti.NAME
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", built, SOURCE], check=True)
    return built


def test_library_records_without_step_hooks(tmp_path: Path, library: Path) -> None:
    records = asyncio.run(
        switched(tmp_path, m.ProfilingSet(1, 1), TASKD_PROFILING_MSPTI=str(library))
    )
    host = next(line for line in records if line["Name"] == "dataloader")
    assert host["Flag"] == 2
    assert (host["SourceKind"], host["Domain"]) == (0, "NULL")
    assert host["MsptiObjectId"]["Pt"] == {"ProcessId": 4711, "ThreadId": 7}
    ends = [line for line in records if line["Id"] == host["Id"]]
    assert [(line["Flag"], line["Name"]) for line in ends] == [(2, "dataloader"), (4, "NULL")]
    assert ends[1]["Timestamp"] - ends[0]["Timestamp"] == 500
    device = next(line for line in records if line["Domain"] == "communication")
    assert (device["SourceKind"], device["Flag"]) == (1, 16)
    assert device["MsptiObjectId"]["Ds"] == {"DeviceId": 3, "StreamId": 7}


def test_library_error_is_reported_and_training_continues(tmp_path: Path, library: Path) -> None:
    """Another program in the process has subscribed."""
    env = {"TASKD_PROFILING_MSPTI": str(library), "MSPTI_IN_USE": "1"}
    assert asyncio.run(switched(tmp_path, m.ProfilingSet(2, 2), **env)) == []


def test_profiling_fails_without_library_and_framework(tmp_path: Path) -> None:
    assert asyncio.run(switched(tmp_path, m.ProfilingSet(2, 2))) == []


async def switched(tmp_path: Path, expected: m.ProfilingSet, **env: str) -> list[dict[str, Any]]:
    """Switch profiling of a job without torch and MindSpore on and off; returns its records."""
    async with (
        running_bus(manager(), None, serves=True, job="the-job") as top,
        running_bus(proxy(1), top, serves=True, job="the-job") as relay,
        running(tmp_path, ASCEND, relay.port, MS_NODE_RANK="1", **env) as process,
    ):
        await answer_of(top, m.ProfilingSet(0, 0))
        await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(True, True)))
        await answer_of(top, expected)
        await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(False, False)))
        await answer_of(top, m.ProfilingSet(0, 0))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        out, err = await asyncio.wait_for(process.communicate(), STARTED_S)
        assert process.returncode == 0, (out + err).decode()
    files = list((tmp_path / "profiling").glob("the-job/5/*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_only_libraries_that_only_root_can_write_are_found_automatically(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mspti, "CANN_PATHS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    assert mspti.find("") is None, "any user may write to /tmp"
    assert mspti.find(mspti.DISABLED) is None
    assert mspti.find(str(library)) is not None
    (tmp_path / mspti.NAME).write_text("not a library")
    assert mspti.find(str(tmp_path / mspti.NAME)) is None
    if not os.geteuid():
        folder = Path("/usr/local/lib/taskd-test-mspti")
        folder.mkdir()
        try:
            shutil.copy(library, folder)
            monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
            assert mspti.find("") is not None
            monkeypatch.delenv("LD_LIBRARY_PATH")
            assert mspti.find("") is None
            cached(tmp_path, folder / mspti.NAME, monkeypatch)
            assert mspti.find("") is not None
            folder.chmod(0o777)
            assert mspti.find("") is None
        finally:
            shutil.rmtree(folder)


def cached(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the library into a fake cache of the loader."""
    ldconfig = tmp_path / "ldconfig"
    lines = (
        "2 libs found in cache `/etc/ld.so.cache'",
        f"\t{mspti.NAME} (libc6,x86-64) => {library}",
        f"\t{mspti.NAME}.1 (libc6,x86-64) => /nowhere/{mspti.NAME}.1",
    )
    ldconfig.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    ldconfig.chmod(0o755)
    monkeypatch.setattr(mspti, "LDCONFIG", str(ldconfig))
