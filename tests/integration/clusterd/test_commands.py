"""The commands as users type them, against a server in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskd.clusterd import locate
from taskd.errors import SettingsError
from taskd.wire._pb import control_pb2
from tests import ROOT
from tests.integration.clusterd.client import WAIT_S, Client, connected


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def environment(place: Path, **extra: str) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith("TASKD_")}
    return known | {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": str(place)} | extra


def taskd(place: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "taskd", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(place, **extra),
        check=False,
    )


@pytest.fixture
def server(place: Path) -> Iterator[str]:
    (place / "tokens").write_text("operator boss\njob:job key\n")
    words = ["clusterd", "--listen", "127.0.0.1:0", "--journal", str(place / "journal")]
    running = subprocess.Popen(
        [sys.executable, "-m", "taskd", *words, "--tokens", str(place / "tokens")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(place),
    )
    assert running.stdout is not None
    yield f"127.0.0.1:{running.stdout.readline().split()[-1]}"
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    running.stdout.close()


async def a_round(client: Client) -> None:
    await client.declare("recover-in-place", nodes=2, per_node=2)
    await client.join()
    signals = await client.subscribe()
    await client.fault(3)
    await client.stopped((await signals.next()).uuid)
    await client.offer("recover", uuid=(await signals.next()).uuid)
    await client.result("recover", uuid=(await signals.next()).uuid)
    await client.code(
        "PublishProgress",
        control_pb2.JobProgress(
            job="job",
            step=41,
            steps_per_s=3.5,
            world=4,
            ranks=[control_pb2.RankStatus(rank=r, host="here", phase="training") for r in range(4)],
        ),
    )


def test_commands_show_jobs_status_and_history(place: Path, server: str) -> None:
    at = ("--server", server, "--token", "boss")

    async def prepare() -> subprocess.CompletedProcess[str]:
        async with connected(server, "key") as client:
            await a_round(client)
            return await asyncio.to_thread(taskd, place, "status", "job", *at)

    status = asyncio.run(prepare())
    assert status.returncode == 0, status.stderr
    assert "Idle" in status.stdout
    assert "step       41, 3.50 steps/s" in status.stdout
    assert "recover-in-place" in status.stdout
    assert status.stdout.count("training") == 4

    status = taskd(place, "status", "job", *at)
    assert "step       41, 0.00 steps/s" in status.stdout
    assert "the state is unknown" in status.stdout
    assert "training" not in status.stdout, "its manager is disconnected"

    status = json.loads(taskd(place, "status", "--json", *at).stdout)
    assert status["line"]["job"] == "job"

    assert "job" in taskd(place, "jobs", *at).stdout
    listed = json.loads(taskd(place, "jobs", "--json", *at).stdout)
    assert listed["jobs"][0]["state"] == "Idle"

    replayed = taskd(place, "replay", "job", *at).stdout
    assert "incident 1, 20" in replayed
    assert " UTC: rank 3" in replayed
    assert "-> recover-in-place: recovered in " in replayed
    assert " ms  Idle -> Stopping: fault of rank 3" in replayed
    assert "Replacing -> Idle" in replayed
    assert "command  Signal" not in replayed, "only with --messages"
    assert "command  Signal" in taskd(place, "replay", "job", "--messages", *at).stdout
    assert "Stopping" not in taskd(place, "replay", "job", "--incident", "9", *at).stdout

    reported = taskd(
        place, "fault", "job", "--rank", "2", "--kind", "communication", "--because", "seen", *at
    )
    assert reported.returncode == 0, reported.stderr
    now = taskd(place, "status", "job", *at).stdout
    assert "Stopping" in now
    assert "rank 2, communication" in now

    denied = taskd(place, "status", "job", "--server", server, "--token", "wrong")
    assert denied.returncode == 1
    assert "no valid token" in denied.stderr
    unknown = taskd(place, "status", "nobody", *at)
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr
    nowhere = taskd(place, "jobs", "--server", "127.0.0.1:1")
    assert nowhere.returncode == 1
    assert "127.0.0.1:1" in nowhere.stderr
    by_environment = taskd(place, "jobs", TASKD_CLUSTERD=server, TASKD_CLUSTERD_TOKEN="key")
    assert "job" in by_environment.stdout


def test_watch_is_live(place: Path, server: str) -> None:
    async def main() -> None:
        async with connected(server, "key") as client:
            await a_round(client)
            watching = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taskd", "status", "job", "--watch", "--json"),
                *("--server", server, "--token", "key"),
                stdout=subprocess.PIPE,
                env=environment(place),
            )
            assert watching.stdout is not None
            async with asyncio.timeout(WAIT_S):
                first = json.loads(await watching.stdout.readline())
                assert first["line"]["state"] == "Idle"
                await client.fault(1)
                while json.loads(await watching.stdout.readline())["line"]["state"] == "Idle":
                    pass
                await client.code("EndJob", control_pb2.JobEnd(job="job", because="all is done"))
                rest = (await watching.stdout.read()).decode().splitlines()
                assert await watching.wait() == 0
            last = json.loads(rest[-1])["line"]
            assert (last["state"], last["because"]) == ("Ended", "all is done")

    asyncio.run(main())


def test_a_watch_outlives_a_restart_and_ends_with_the_job(place: Path) -> None:
    async def serve(port: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taskd", "clusterd", "--listen", f"127.0.0.1:{port}"),
            *("--journal", str(place / "journal")),
            stdout=subprocess.PIPE,
            env=environment(place),
        )
        assert process.stdout is not None
        return process, (await process.stdout.readline()).split()[-1].decode()

    async def main() -> None:
        process, port = await serve("0")
        async with asyncio.timeout(60), connected(f"127.0.0.1:{port}") as client:
            await a_round(client)
            watching = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taskd", "status", "job", "--watch"),
                *("--server", f"127.0.0.1:{port}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(place),
            )
            assert watching.stdout is not None
            await watching.stdout.readline()
            process.terminate()
            await process.wait()
            process, _ = await serve(port)
            await client.channel.channel_ready()
            while b"not subscribed" not in await watching.stdout.readline():
                pass
            await client.code("EndJob", control_pb2.JobEnd(job="job", because="all is done"))
            output, wrong = await watching.communicate()
            assert output.decode().splitlines()[-1] == "job job has ended: all is done"
            assert (watching.returncode, wrong) == (0, b"")
        process.terminate()
        await process.wait()

    asyncio.run(main())


def test_watch_of_an_ended_job_ends_without_error(place: Path) -> None:
    """The clusterd inside a manager ends with its job and removes its announcement."""
    script = """
import asyncio, sys
from taskd.manager.clusterd_link.embedded_clusterd import clusterd
from taskd.manager.settings import ManagerConfig
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.reports.job_status import declaration

async def main():
    async with clusterd(ManagerConfig(job_id="mine", token="secret")) as config:
        line = ClusterdClient(config.clusterd, config)
        line.declaration = declaration(config)
        subscribed = asyncio.Event()
        task = asyncio.create_task(line.listen(lambda signal: None, subscribed.set))
        await subscribed.wait()
        print(config.clusterd, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        task.cancel()
        await line.close()

asyncio.run(main())
"""

    async def main() -> None:
        manager = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(place),
        )
        assert manager.stdout is not None
        assert manager.stdin is not None
        async with asyncio.timeout(60):
            address = (await manager.stdout.readline()).decode().strip()
            assert taskd(place, "jobs").returncode == 0
            assert taskd(place, "status", "mine", "--server", address).returncode == 0
            stranger = place / "stranger"
            stranger.mkdir(mode=0o700)
            refused = taskd(stranger, "fault", "mine", "--rank", "0", "--server", address)
            assert refused.returncode == 1
            assert "token" in refused.stderr
            watching = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taskd", "status", "--watch"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(place),
            )
            assert watching.stdout is not None
            await watching.stdout.readline()
            manager.stdin.write(b"\n")
            await manager.wait()
            output, wrong = await watching.communicate()
        assert output.decode().splitlines()[-1] == "job mine has ended"
        assert (watching.returncode, wrong) == (0, b"")

    asyncio.run(main())


def test_replay_reads_a_journal_without_a_server(place: Path) -> None:
    words = ["clusterd", "--listen", "127.0.0.1:0", "--journal", str(place / "journal")]
    running = subprocess.Popen(
        [sys.executable, "-m", "taskd", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(place),
    )
    assert running.stdout is not None
    address = f"127.0.0.1:{running.stdout.readline().split()[-1]}"

    async def main() -> None:
        async with connected(address) as client:
            await a_round(client)

    asyncio.run(main())
    in_use = taskd(place, "replay", "job", "--journal", str(place / "journal"))
    assert "Idle -> Stopping: fault of rank 3" in in_use.stdout, in_use.stderr
    running.kill()
    running.communicate()
    shown = taskd(place, "replay", "job", "--journal", str(place / "journal"))
    assert "Idle -> Stopping: fault of rank 3" in shown.stdout, shown.stderr
    missing = taskd(place, "replay", "job", "--journal", str(place / "nothing"))
    assert "does not exist" in missing.stderr


def test_all_invalid_settings_are_reported_at_once(place: Path) -> None:
    words = ["--listen", "127.0.0.1:0", "--journal", str(place / "journal")]
    wrong = taskd(
        place,
        *("clusterd", *words, "--strategies", "retry,restart", "--set", "stop_timeout_s=x"),
        *("--tls-ca", "ca.pem"),
    )
    assert wrong.returncode == 1
    for part in ("restart", "stop_timeout_s=x", "--tls-ca needs --tls"):
        assert part in wrong.stderr


# Finding the server


def test_an_announced_job_is_found_until_its_process_ends(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.delenv("TASKD_CLUSTERD", raising=False)
    with pytest.raises(SettingsError, match="--server"):
        locate.find()
    path = locate.announce("a/b", "127.0.0.1:7", "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert locate.find().address == "127.0.0.1:7"
    assert locate.find("a/b").token == "secret"
    with pytest.raises(SettingsError, match="other"):
        locate.find("other")
    assert locate.find("other", server="host").address == "host:8899"
    locate.withdraw("a/b")
    assert locate.announced() == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = locate.announce("left", "127.0.0.1:8")
    left.write_text(json.dumps({"address": "x:1", "job": "left", "pid": ended.pid}))
    assert locate.announced() == []
    assert not left.exists()


def test_a_directory_that_others_can_write_is_not_trusted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (place / "taskd").mkdir()
    (place / "taskd").chmod(0o777)
    with pytest.raises(SettingsError, match="only you"):
        locate.directory()
