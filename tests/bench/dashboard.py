"""The dashboard for a simulated job of 10,000 ranks with an incident every 10 seconds.

A real clusterd, a simulated manager, the real dashboard with 50 pages (one in Chromium) behind it:
the CPU of clusterd with and without the dashboard, the dashboard's memory, the first paint, and the
frames per second while the page scrolls.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from playwright.async_api import async_playwright

from taskd.wire._pb import control_pb2 as pb
from tests import ROOT
from tests.bench.rows import Row
from tests.integration.clusterd.client import Client, connected

RANKS, PER_NODE, PAGES, INCIDENT_EVERY = 10_000, 8, 50, 10
SECONDS = 30.0
"""How long the CPU of clusterd is measured, without and with the dashboard."""
FRAMES = """
async () => {
  const box = document.querySelector(".carpet");
  let frames = 0, longest = 0, last = performance.now();
  const began = last;
  while (performance.now() - began < 5000) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    longest = Math.max(longest, now - last);
    last = now;
    box.scrollTop = (frames++ * 23) % Math.max(1, box.scrollHeight - box.clientHeight);
  }
  return [frames / ((performance.now() - began) / 1000), longest];
}
"""


def progress(ranks: int, second: int) -> pb.JobProgress:
    phase = "parked" if second % INCIDENT_EVERY == 0 else "training"
    return pb.JobProgress(
        job="job",
        step=second,
        steps_per_s=1.0,
        world=ranks,
        summary="Training",
        rank_version=(second + INCIDENT_EVERY - 1) // INCIDENT_EVERY * 2 + (phase == "parked"),
        goodput=0.9,
        ranks=[
            pb.RankStatus(
                rank=r,
                node=r // PER_NODE,
                host=f"host{r // PER_NODE}",
                pid=r,
                phase=phase,
                step=second,
            )
            for r in range(ranks)
        ],
        nodes=[
            pb.NodeStatus(node=n, host=f"host{n}", present=True, ranks=PER_NODE)
            for n in range(ranks // PER_NODE)
        ],
    )


async def train(client: Client, ranks: int) -> None:
    """The manager's part: a status per second, an incident every ten."""
    signals = await client.subscribe()
    incident = second = 0
    while True:
        began = time.monotonic()
        second += 1
        await client.call("PublishProgress", progress(ranks, second))
        if second % INCIDENT_EVERY == 0:
            incident += 1
            rank = (incident * 7919) % ranks
            at = round(time.time() * 1000)
            await client.fault(rank)
            await client.stopped((await signals.next("stopTrain")).uuid)
            await client.offer("recover", uuid=(await signals.next("globalFault")).uuid)
            await client.result("recover", uuid=(await signals.next("changeStrategy")).uuid)
            names = ("seen", "stopped", "decided", "forked", "groups", "state", "step")
            phases = [
                pb.Phase(name=n, at_unix_ms=at + 50 * i, took_ms=50.0 * bool(i))
                for i, n in enumerate(names)
            ]
            fault = pb.IncidentFault(
                rank=rank, node=rank // PER_NODE, cause="exited", evidence="signal 9"
            )
            await client.call(
                "ReportIncident",
                pb.IncidentReport(
                    job="job",
                    incident=incident,
                    phases=phases,
                    outcome="recovered",
                    strategy="recover-in-place",
                    faults=[fault],
                ),
            )
        await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


def spawn(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "taskd", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


async def cpu_share(pid: int, seconds: float) -> float:
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


async def read_events(page: httpx.AsyncClient, count: list[int]) -> None:
    async with page.stream("GET", "/api/v1/jobs/job/events") as stream:
        async for line in stream.aiter_lines():
            count[0] += line.startswith("event: job")


async def look(url: str) -> tuple[float, float, float]:
    """First paint in milliseconds; frames per second while scrolling; the longest frame."""
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        await page.goto(url)
        await page.wait_for_selector(".hero.training, .hero.recovering")
        await page.reload()
        await page.wait_for_selector(".hero.training, .hero.recovering")
        paint = await page.evaluate(
            "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        await page.wait_for_timeout(3000)
        frames, longest = await page.evaluate(FRAMES)
        await browser.close()
    return paint, frames, longest


async def _measured(ranks: int, seconds: float, folder: Path) -> dict[str, float]:
    server = spawn(
        folder, "clusterd", "--listen", "127.0.0.1:0", "--journal", str(folder / "journal")
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{server.stdout.readline().split()[-1]}"
    try:
        async with connected(address) as client:
            await client.declare("recover-in-place", nodes=ranks // PER_NODE, per_node=PER_NODE)
            await client.join()
            training = asyncio.create_task(train(client, ranks))
            await asyncio.sleep(5)
            alone = await cpu_share(server.pid, seconds)
            dashboard = spawn(folder, "dashboard", "--server", address, "--listen", "127.0.0.1:0")
            assert dashboard.stderr is not None
            url = re.search(r"http\S+", dashboard.stderr.readline())
            assert url is not None
            try:
                counts = [[0] for _ in range(PAGES - 1)]
                limits = httpx.Limits(max_connections=None)
                page = httpx.AsyncClient(
                    base_url=url[0].partition("/login")[0], timeout=None, limits=limits
                )
                await page.get(url[0])
                pages = [asyncio.create_task(read_events(page, each)) for each in counts]
                await asyncio.sleep(5)
                watched = await cpu_share(server.pid, seconds)
                paint, frames, longest = await look(url[0])
                memory = psutil.Process(dashboard.pid).memory_info().rss / 2**20
                for task in (*pages, training):
                    task.cancel()
            finally:
                dashboard.terminate()
                dashboard.wait()
    finally:
        server.terminate()
        server.wait()
    return {
        "alone": alone,
        "watched": watched,
        "memory": memory,
        "paint": paint,
        "frames": frames,
        "longest": longest,
        "updates": min(each[0] for each in counts),
    }


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        seen = asyncio.run(_measured(RANKS, SECONDS, Path(folder)))
    job = f"{RANKS:,} ranks, an incident every {INCIDENT_EVERY} s"
    more = seen["watched"] - seen["alone"]
    return [
        Row(
            f"{job}: frames per second while the page scrolls",
            f"{seen['frames']:.1f}/s, the longest took {seen['longest']:.0f} ms",
            "30/s",
            seen["frames"] / 30,
            1,
            at_least=True,
        ),
        Row("first paint of that page", f"{seen['paint']:.0f} ms", "1 s", seen["paint"] / 1000, 1),
        Row(
            f"memory of the dashboard, with {PAGES} open pages",
            f"{seen['memory']:.1f} MiB",
            "100 MiB",
            seen["memory"] / 100,
            1,
        ),
        Row(
            "what the dashboard and its pages add to the CPU of clusterd",
            f"{more:.2f} % of a core ({seen['watched']:.2f} instead of {seen['alone']:.2f})",
            "1 % of a core",
            max(0.0, more),
            1,
        ),
    ]
