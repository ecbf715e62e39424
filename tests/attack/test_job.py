"""A live job of two nodes: its bus, its store and its members are attacked while it trains."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

from grpc import aio
from torch.distributed import TCPStore

from taskd.bus.security import JOB_KEY, TOKEN_KEY, make_token
from taskd.model.ids import Position, agent, manager, worker
from taskd.runtime.address import free_port
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire.bus_frames import position_to_pb
from tests.attack.attacks import DISCOVER, REFUSED, MemoryWatch, Tried, flood_from_another_process
from tests.integration.run.run_job import TOKEN, Job, script

ENOUGH = "enough"
"""The file beside the script that ends its training, after however many steps the attacks took."""
TRAIN = f"""
import time
from pathlib import Path

import torch
import torch.distributed as dist
import taskd.torch as taskd

job = taskd.init("gloo")
seed = torch.tensor([job.rank + 7])
dist.broadcast(seed, 0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
enough = torch.tensor([False])
for step in job.steps(1_000_000):
    with step:
        enough[0] = Path(__file__).with_name("{ENOUGH}").exists()
        dist.broadcast(enough, 0)
        optimizer.zero_grad()
        model(torch.ones(2, 4) * int(seed)).sum().backward()
        optimizer.step()
    print("step", int(step), flush=True)
    if enough:
        break
    time.sleep(0.1)
print("trained", flush=True)
"""


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def forged(me: Position) -> list[tuple[tuple[str, str], ...]]:
    """The metadata of strangers that claim this position."""
    position = (
        ("role", me.role),
        ("serverrank", me.server_rank),
        ("processrank", me.process_rank),
    )
    tokens = [
        "",
        TOKEN,
        "0" * 64,
        make_token("guess", "attacked", me),
        make_token("old-secret", "attacked", me),
        make_token(TOKEN, "attacked", me),
        make_token(TOKEN, "another", me),
        make_token(TOKEN, "attacked", worker(9, 9)),
    ]
    made = [(*position, (JOB_KEY, "attacked"), (TOKEN_KEY, token)) for token in tokens]
    right = make_token(TOKEN, "attacked", me)
    return [*made, position, (*position, (JOB_KEY, "another"), (TOKEN_KEY, right))]


async def attack_bus(address: str, tried: Tried) -> None:
    async with aio.insecure_channel(address) as channel:
        for me in (agent(0), agent(1), worker(1, 1), manager(), Position("Proxy", "1")):
            pos = position_to_pb(me)
            calls = {
                "/TaskNet/Register": pb.RegisterReq(uuid="1", pos=pos),
                "/TaskNet/PathDiscovery": pb.PathDiscoveryReq(uuid="1", proxyPos=pos, path=[pos]),
                "/TaskNet/TransferMessage": pb.Message(
                    header=pb.MessageHeader(uuid="1", src=pos, dst=position_to_pb(manager()))
                ),
            }
            for method, request in calls.items():
                for metadata in forged(me):
                    status = await tried.call(
                        channel, method, request.SerializeToString(), metadata
                    )
                    assert status in REFUSED, f"{method} as {me} was answered with {status}"


def plant(port: int, opened: Path) -> int:
    """Overwrite what ranks left in the store for their replacements, by pickles that run code."""
    store = TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    evil = pickle.dumps(Trap(opened))
    planted = 0
    for rank in (0, 1):
        for group in ("0", "default_pg", ""):
            for number in range(1, 6):
                for data in (evil, bytes(16) + evil):
                    key = f"attempt/0/setup/{rank}/{group}/{number}"
                    store.set(key, data)  # type: ignore[arg-type]
                    planted += 1
    return planted


def test_two_node_job_trains_through_all_attacks(tmp_path: Path) -> None:
    store, bus = free_port(), free_port()
    ports = [f"--master-port={store}", f"--manager-port={bus}"]
    path = script(tmp_path, TRAIN)
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("old-secret\n")
    launchers = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        words = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--job-id=attacked"]
        known = {"TASKD_BUS_TOKEN_FILE": str(secrets)}
        launchers.append(Job(folder, *words, *ports, path, **known))
    first, second = launchers
    first.wait_for("step 3")
    secrets.write_text("new-secret\nold-secret\n")
    tried, opened = Tried(), tmp_path / "opened"

    async def attack() -> float:
        secrets.write_text("new-secret\n")  # the old one is worth nothing any more
        await attack_bus(f"127.0.0.1:{bus}", tried)
        async with MemoryWatch(first.manager().pid) as memory:
            attacker = await flood_from_another_process(
                f"127.0.0.1:{bus}", DISCOVER, 8_000_000, 5.0, at_least=500_000_000
            )
        offered = attacker.offered
        assert offered >= 500_000_000, f"only {offered / 1e6:.0f} MB were offered"
        return memory.growth_mib

    growth = asyncio.run(attack())
    assert growth < 100, f"the manager grew by {growth:.0f} MiB"
    assert plant(store, opened)
    second.worker(1).kill()
    (tmp_path / ENOUGH).touch()
    ended = [launcher.end() for launcher in launchers]
    assert not opened.exists(), "a planted pickle has run"
    assert [one.code for one in ended] == [0, 0], ended[0].err
    assert "trained" in ended[0].out
    assert ", 1 fault:" in ended[0].err, f"an attack is not an incident: {ended[0].err}"
    print(f"{tried.show()}\ngrowth={growth:.0f} MiB, exit codes {[e.code for e in ended]}")  # noqa: T201
