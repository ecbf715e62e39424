"""A cluster in a directory, for tests of clusterd: its objects, and a job that it describes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from taskd.clusterd.cluster.inotify import Watch
from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.main import Server, ServerConfig
from taskd.commands import render as show
from taskd.core.clusterd.job_config import RecoveryConfig
from tests.integration.clusterd.client import WAIT_S, Client, Signals, eventually, started

JOB = "0f7b"
NAMESPACES = {"mindx-dl-deviceinfo": "kube-system", "mindx-dl-nodeinfo": "mindx-dl"}
EVERY = "retry, recover-in-place,recover ,elastic-training,dump"


def checksum(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


class Objects:
    """The other side of the directory: the user, the scheduler and the platform."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, kind: str, name: str, body: Json) -> None:
        folder = {"PodGroup": "podgroups", "Pod": "pods", "ConfigMap": "configmaps"}.get(
            kind, "nodes"
        )
        namespace = NAMESPACES.get(name.rpartition("-")[0], "team")
        metadata: Json = {"name": name, **body.pop("metadata", {})}
        if kind != "Node":
            metadata["namespace"] = namespace
        path = self.directory / folder / f"{namespace}.{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.test")
        fresh.write_text(yaml.safe_dump({"kind": kind, "metadata": metadata, **body}))
        fresh.rename(path)

    def read(self, folder: str, name: str) -> Json:
        body: Json = yaml.safe_load((self.directory / folder / f"team.{name}.yaml").read_text())
        return body

    def group(self, strategies: str = EVERY, phase: str = "Running", **extra: Any) -> None:
        labels = {"process-recover-enable": "on", "framework": "pytorch", **extra.get("labels", {})}
        self.write(
            "PodGroup",
            "train",
            {
                "metadata": {
                    "ownerReferences": [{"uid": JOB, "name": "train", "controller": True}],
                    "labels": labels,
                    "annotations": {"recover-strategy": strategies, **extra.get("annotations", {})},
                },
                "status": {"phase": phase},
            },
        )

    def change_group(self, change: Callable[[Json], None]) -> None:
        body = self.read("podgroups", "train")
        change(body)
        self.write("PodGroup", "train", {k: v for k, v in body.items() if k != "kind"})

    def pod(self, node: int, uid: str = "", name: str = "", **annotations: str) -> None:
        devices = [{"device_id": str(i), "rank_id": str(node * 2 + i)} for i in range(2)]
        self.write(
            "Pod",
            name or f"train-{node}",
            {
                "metadata": {
                    "uid": uid or f"pod-{node}",
                    "ownerReferences": [{"uid": JOB, "name": "train", "controller": True}],
                    "annotations": {
                        "hccl/rankIndex": str(node),
                        "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(
                            {"devices": devices}
                        ),
                        **annotations,
                    },
                },
                "spec": {"nodeName": f"host{node}"},
                "status": {"phase": "Running"},
            },
        )

    def reset_config(self, **data: Any) -> None:
        body = {"RankList": [], "RetryTime": 3, "UpdateTime": 0, **data}
        self.write("ConfigMap", "reset-config-train", {"data": {"reset.json": json.dumps(body)}})

    @property
    def reset(self) -> Json:
        data = self.read("configmaps", "reset-config-train")["data"]
        assert hashlib.sha256(data["reset.json"].encode()).hexdigest() == data["checkCode"]
        content: Json = json.loads(data["reset.json"])
        return content

    def sub_health(self, node: int, level: str = "SubHealthFault", code: str = "") -> None:
        """`code`: a CheckCode that need not match."""
        self.device_report(node, [device_fault("80E18005", level)], check=code)

    def device_report(
        self, node: int, entries: list[Json], check: str = "", switch: Json | None = None
    ) -> None:
        """As the device plugin of host<node> writes it."""
        data = {"DeviceInfoCfg": device_info(entries, check)}
        if switch is not None:
            data["SwitchInfoCfg"] = json.dumps(switch)
        self.write("ConfigMap", f"mindx-dl-deviceinfo-host{node}", {"data": data})

    def node_report(self, node: int, status: str, *faults: Json) -> None:
        """As NodeD on host<node> writes it."""
        info = {"FaultDevList": list(faults), "NodeStatus": status}
        report = {"NodeInfo": info, "CheckCode": checksum(info)}
        data = {"NodeInfo": json.dumps(report), "updateTime": "2026-01-01T00:00:00Z"}
        self.write("ConfigMap", f"mindx-dl-nodeinfo-host{node}", {"data": data})

    async def until(self, folder: str, holds: Callable[[], bool]) -> None:
        """Wait until the files meet a condition; checked whenever one changes."""
        news = asyncio.Event()
        watch = Watch([self.directory / folder], lambda _: news.set())
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    await news.wait()
                    news.clear()
        finally:
            watch.close()


def device_fault(code: str, level: str, device: int = 1, **more: Any) -> Json:
    """A faulty device in a report."""
    return {
        "fault_type": "CardUnhealthy",
        "npu_name": f"Ascend910-{device}",
        "fault_level": level,
        "fault_code": code,
        **more,
    }


def device_info(entries: list[Json], check: str = "") -> str:
    """What the device plugin writes. `check`: a CheckCode that need not match."""
    listed = {"huawei.com/Ascend910-Fault": json.dumps(entries)}
    devices = {"DeviceList": listed, "UpdateTime": 1_700_000_000}
    return json.dumps(
        {"DeviceInfo": devices, "SuperPodID": -1, "CheckCode": check or checksum(devices)}
    )


@asynccontextmanager
async def cluster(objects: Objects, **recovery: float) -> AsyncIterator[tuple[Server, Client]]:
    config = ServerConfig(
        cluster_dir=objects.directory,
        recovery=RecoveryConfig(**recovery),  # type: ignore[arg-type]
    )
    async with started(config, job=JOB) as pair:
        try:
            yield pair
        except TimeoutError:
            sys.stderr.write("\n".join(show.history(await pair[1].history())))
            raise


async def joined(server: Server, client: Client, at_rest: bool = True) -> Signals:
    """`at_rest`: nothing is wrong with the job, so it writes nothing after its registration."""
    await client.join()
    signals = await client.subscribe()
    owner = server.jobs.served[JOB]  # type: ignore[index]
    await eventually(lambda: owner.state.job.subscribed and bool(owner.state.job.pods), server, JOB)
    if at_rest:
        await quiet(server)
    return signals


async def quiet(server: Server) -> None:
    """No write is in progress that could conflict with one of ours."""
    owner = server.jobs.served[JOB]  # type: ignore[index]
    await eventually(lambda: not owner.record.undone, server, JOB)


async def lost_for_good(client: Client, signals: Signals) -> None:
    """A node is lost and no pod replaces it: the job follows all orders until the end."""
    await client.fault(2)
    while True:
        signal = await signals.next()
        match signal.signalType, signal.changeStrategy:
            case "stopTrain", _:
                await client.stopped(signal.uuid)
            case "globalFault", _:
                await client.offer("recover", "exit", uuid=signal.uuid)
            case "changeStrategy", "exit":
                return
            case other:
                assert other == ("changeStrategy", "recover")


def mark(objects: Objects) -> str:
    labels = objects.read("podgroups", "train")["metadata"]["labels"]
    return str(labels["process-recover-enable"])
