"""A real job of four ranks, its dashboard as a process of its own, and Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlStub
from tests import ROOT
from tests.bench.dashboard import spawn

WAIT_S = 90.0
SCRIPT = ROOT / "examples" / "train_ddp.py"
expect.set_options(timeout=WAIT_S * 1000)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Running:
    """A job and its dashboard."""

    job: str
    url: str
    """With the key that signs in."""
    environment: dict[str, str]
    launcher: subprocess.Popen[bytes]
    folder: Path

    @property
    def base(self) -> str:
        return self.url.partition("/login")[0]

    def taskd(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "taskd", *words],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            env=self.environment,
            check=True,
        )
        return done.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.taskd("status", self.job, "--json"))
        return status

    def kill(self, rank: int) -> None:
        self.send_signal(rank, signal.SIGKILL)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        (pid,) = [each["pid"] for each in self.status()["ranks"] if each["rank"] == rank]
        os.kill(pid, number)


def eventually(holds: Callable[[], bool]) -> None:
    for _ in Tries(every(0.1), deadline=monotonic() + WAIT_S):
        if holds():
            return
    pytest.fail("it did not become true in time")


@contextmanager
def running(folder: Path, job: str = "", script: Path = SCRIPT) -> Iterator[Running]:
    job = job or f"shown-{os.getpid()}"
    folder.chmod(0o700)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TASKD_")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": str(folder)}
    output = folder / "run.log"
    words = ["run", "--nproc-per-node", "4", "--job-id", job, "--dashboard=127.0.0.1:0"]
    words += ["--state-dir", str(folder / "state")]
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "taskd",
                *words,
                str(script),
                "100000",
                "0.05",
            ],
            env=environment,
            stdout=file,
            stderr=file,
            cwd=folder,
        )
    try:
        eventually(lambda: "/login?key=" in output.read_text())
        url = re.search(r"http\S+", output.read_text())
        assert url is not None
        found = Running(job, url[0], environment, launcher, folder)
        eventually(lambda: found.status()["line"]["step"] > 5)
        yield found
    finally:
        launcher.terminate()
        launcher.wait(WAIT_S)


@dataclass
class Several:
    """A dashboard of several jobs."""

    url: str
    clusterd: str

    def declare(self, name: str) -> None:
        control: Any = ControlStub
        with grpc.insecure_channel(self.clusterd) as channel:
            nodes = [pb.Node(node_rank=0, name="host0", ranks=range(4))]
            declared = pb.JobDeclaration(job=name, strategies=["recover"], nodes=nodes)
            assert control(channel).DeclareJob(declared, timeout=WAIT_S).code == 0


@contextmanager
def dashboard_of_jobs(folder: Path, names: list[str]) -> Iterator[Several]:
    """A dashboard for a clusterd of its own, which has these jobs."""
    folder.chmod(0o700)
    journal = str(folder / "journal")
    server = spawn(folder, "clusterd", "--listen", "127.0.0.1:0", "--journal", journal)
    assert server.stdout is not None
    address = f"127.0.0.1:{server.stdout.readline().split()[-1]}"
    dashboard = spawn(folder, "dashboard", "--server", address, "--listen", "127.0.0.1:0")
    assert dashboard.stderr is not None
    try:
        url = re.search(r"http\S+", dashboard.stderr.readline())
        assert url is not None
        found = Several(url[0], address)
        for name in names:
            found.declare(name)
        yield found
    finally:
        for process in (dashboard, server):
            process.terminate()
            process.communicate(timeout=WAIT_S)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("job")) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Visitor:
    """A browser window that must not show any error or violation of the content policy."""

    context: BrowserContext
    page: Page
    problems: list[str]


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    viewport: Any = {"width": 1280, "height": 900}
    context = browser.new_context(viewport=viewport, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(WAIT_S * 1000)
    problems: list[str] = []
    page.on("console", lambda message: _note(problems, message.type, message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"a script ran: {dialog.message}"))
    yield Visitor(context, page, problems)
    context.close()
    assert problems == []


def _note(problems: list[str], kind: str, text: str) -> None:
    if kind in ("error", "warning") and "Failed to load resource" not in text:
        problems.append(text)
