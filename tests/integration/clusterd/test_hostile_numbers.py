"""A tenant that reports impossible numbers: every reader of its job still works, for all jobs."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

from taskd.model.codes import RecoverCode
from taskd.wire._pb import control_pb2 as pb
from tests.integration.clusterd.client import Client, connected
from tests.integration.clusterd.test_commands import place, server, taskd

__all__ = ["place", "server"]

MOST, LEAST = 2**63 - 1, -(2**63)


def hostile_progress(number: float, whole: int) -> pb.JobProgress:
    small = 2**31 - 1 if whole > 0 else -(2**31)
    return pb.JobProgress(
        job="job",
        step=whole,
        steps_per_s=number,
        world=small,
        goodput=number,
        started_unix_ms=whole,
        total_steps=whole,
        ranks=[pb.RankStatus(rank=small, node=small, pid=small, step=whole, idle_s=number)],
        nodes=[pb.NodeStatus(node=small, ranks=small, shards=small)],
        shards=[pb.ShardStatus(shard="s", replicas=[small], copies=[small])],
        stragglers=[pb.Straggler(rank=small, late_ms=number, slower=number, since_unix_ms=whole)],
    )


def hostile_incident(number: float, whole: int) -> pb.IncidentReport:
    small = 2**31 - 1 if whole > 0 else -(2**31)
    return pb.IncidentReport(
        job="job",
        incident=1,
        phases=[
            pb.Phase(name=name, at_unix_ms=whole, took_ms=number)
            for name in ("seen", "stopped", "decided", "state", "step")
        ],
        faults=[pb.IncidentFault(rank=small, node=small)],
        ranks=[pb.RankActivity(rank=small, step=whole, collective=whole, idle_s=number)],
        links=[pb.LinkChange(node=small, change=whole, total=whole)],
    )


async def attack(address: str, number: float, whole: int) -> None:
    async with connected(address, "key") as client:
        await declared(client)
        await client.fault(3)
        invalid = RecoverCode.InvalidReqParam
        assert await client.code("PublishProgress", hostile_progress(number, whole)) == invalid
        assert await client.code("ReportIncident", hostile_incident(number, whole)) == invalid
        # Each number alone: what is not refused, every reader must be able to show.
        messages: list[tuple[Any, str]] = [
            (hostile_progress(number, whole), "PublishProgress"),
            (hostile_incident(number, whole), "ReportIncident"),
        ]
        for message, method in messages:
            for described, value in message.ListFields():
                single = type(message)(job="job")
                if method == "ReportIncident":
                    single.incident = 1
                if isinstance(value, int | float | str):
                    setattr(single, described.name, value)
                else:
                    getattr(single, described.name).extend(value)
                await client.code(method, single)


async def declared(client: Client) -> None:
    await client.declare("recover-in-place", nodes=2, per_node=2)
    await client.join()


def test_commands_show_a_job_with_impossible_numbers(place: Path, server: str) -> None:
    at = ("--server", server, "--token", "boss")
    for number, whole in ((math.nan, MOST), (-math.inf, LEAST)):
        asyncio.run(attack(server, number, whole))
        for words in (
            ("jobs",),
            ("jobs", "--json"),
            ("status", "job"),
            ("status", "job", "--json"),
            ("replay", "job"),
            ("replay", "job", "--json"),
            ("replay", "job", "--html", str(place / "report.html")),
        ):
            done = taskd(place, *words, *at)
            assert (done.returncode, "Traceback" in done.stderr) == (0, False), (
                words,
                number,
                whole,
                done.stderr[-600:],
            )
            if "--json" in words:
                for line in done.stdout.splitlines():
                    json.loads(line, parse_constant=_not_json)
        text = (place / "report.html").read_text()
        data = text.partition('id="data">')[2].partition("</script>")[0]
        json.loads(data, parse_constant=_not_json)


def _not_json(word: str) -> float:
    raise AssertionError(f"{word} is not JSON: a browser cannot read it")
