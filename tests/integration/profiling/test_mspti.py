"""Ascend's profiling library, in a process of its own, through its real interface.

The stand-in is a shared library with the vendor's functions and structures, compiled here.
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
from tests.integration.bus.bus_places import placed, proxy, until_delivered
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
    made = tmp_path_factory.mktemp("cann") / mspti.NAME
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", made, SOURCE], check=True)
    return made


def test_the_library_records_without_a_step_being_seen(tmp_path: Path, library: Path) -> None:
    told = asyncio.run(switched(tmp_path, m.ProfilingSet(1, 1), TASKD_PROFILING_MSPTI=str(library)))
    host = next(line for line in told if line["Name"] == "dataloader")
    assert host["Flag"] == 2
    assert (host["SourceKind"], host["Domain"]) == (0, "NULL")
    assert host["MsptiObjectId"]["Pt"] == {"ProcessId": 4711, "ThreadId": 7}
    ends = [line for line in told if line["Id"] == host["Id"]]
    assert [(line["Flag"], line["Name"]) for line in ends] == [(2, "dataloader"), (4, "NULL")]
    assert ends[1]["Timestamp"] - ends[0]["Timestamp"] == 500
    device = next(line for line in told if line["Domain"] == "communication")
    assert (device["SourceKind"], device["Flag"]) == (1, 16)
    assert device["MsptiObjectId"]["Ds"] == {"DeviceId": 3, "StreamId": 7}


def test_a_library_that_refuses_is_an_exception_not_an_end(tmp_path: Path, library: Path) -> None:
    """Somebody else in the process has subscribed."""
    env = {"TASKD_PROFILING_MSPTI": str(library), "MSPTI_TAKEN": "1"}
    assert asyncio.run(switched(tmp_path, m.ProfilingSet(2, 2), **env)) == []


def test_without_library_and_framework_the_switch_fails(tmp_path: Path) -> None:
    assert asyncio.run(switched(tmp_path, m.ProfilingSet(2, 2))) == []


async def switched(tmp_path: Path, expected: m.ProfilingSet, **env: str) -> list[dict[str, Any]]:
    """A job without torch and MindSpore is switched on and off; its records."""
    async with (
        placed(manager(), None, serves=True, job="the-job") as top,
        placed(proxy(1), top, serves=True, job="the-job") as relay,
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


def test_only_what_root_alone_can_change_is_loaded_by_itself(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mspti, "CANN_PATHS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    assert mspti.find("") is None, "anybody may write to /tmp"
    assert mspti.find(mspti.DISABLED) is None
    assert mspti.find(str(library)) is not None
    (tmp_path / mspti.NAME).write_text("no library")
    assert mspti.find(str(tmp_path / mspti.NAME)) is None
    if not os.geteuid():
        place = Path("/usr/local/lib/taskd-test-mspti")
        place.mkdir()
        try:
            shutil.copy(library, place)
            monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
            assert mspti.find("") is not None
            monkeypatch.delenv("LD_LIBRARY_PATH")
            assert mspti.find("") is None
            cached(tmp_path, place / mspti.NAME, monkeypatch)
            assert mspti.find("") is not None
            place.chmod(0o777)
            assert mspti.find("") is None
        finally:
            shutil.rmtree(place)


def cached(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library were in the loader's cache."""
    told = tmp_path / "ldconfig"
    lines = (
        "2 libs found in cache `/etc/ld.so.cache'",
        f"\t{mspti.NAME} (libc6,x86-64) => {library}",
        f"\t{mspti.NAME}.1 (libc6,x86-64) => /nowhere/{mspti.NAME}.1",
    )
    told.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    told.chmod(0o755)
    monkeypatch.setattr(mspti, "LDCONFIG", str(told))
