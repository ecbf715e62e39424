"""Follows what the managers of a job write to its etcd, and checks the whole history afterwards.

    python -m tests.chaos.etcd_observer JOB TOKEN ADDRESSES FILE

etcd orders all changes of a job by their revision, so the history is linearizable if each change is
allowed after the one before it: a leader begins only when no other one leads, epochs grow, every
decision is written by the leader of that moment, and its number is the next one. A decision that is
lost or made twice, and two leaders that act at the same time, break one of these rules.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpc import aio

from taskd.agent.etcd_member.job_authority import issue
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered, error_of
from taskd.clusterd.etcd.job_terms import job_prefix
from taskd.clusterd.records.packed_text import unpack
from taskd.wire._pb import etcd_pb2 as pb
from taskd.wire._pb import etcd_pb2_grpc as services

FAILED = (EtcdBusy, EtcdRefused, EtcdUnanswered)
CALL_S, RETRY_S = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class Change:
    revision: int
    key: str
    """Without the job's prefix."""
    epoch: int = 0
    """Of the leader that has written it; 0: the key was removed, or has no epoch."""
    sequence: int = 0
    removed: bool = False


def problems(history: Iterable[Change]) -> list[str]:
    """Each rule that the history breaks; empty: it is linearizable."""
    found: list[str] = []
    leader = newest = 0
    sequences: dict[str, int] = {}
    for change in history:
        match change.key:
            case "leader" if change.removed:
                leader = 0
            case "leader":
                if leader:
                    found.append(f"epoch {change.epoch} begins while {leader} leads: {change}")
                if change.epoch <= newest:
                    found.append(f"epoch {change.epoch} begins after {newest}: {change}")
                leader = newest = change.epoch
            case name if name.startswith("jobs/") and change.removed:
                sequences.pop(name, None)
            case name if name.startswith("jobs/"):
                if change.epoch != leader:
                    found.append(f"epoch {change.epoch} decides while {leader} leads: {change}")
                if change.sequence != sequences.get(name, 0) + 1:
                    found.append(f"not the decision after {sequences.get(name, 0)}: {change}")
                sequences[name] = change.sequence
            case "gap":
                found.append(f"etcd has forgotten changes before they were read: {change}")
            case _:
                pass
    return found


def read(path: Path) -> list[Change]:
    return [Change(**json.loads(line)) for line in path.read_text().splitlines()]


async def changes(client: EtcdClient, prefix: str) -> AsyncGenerator[Change, None]:
    """All changes from the first one on, however often the connection ends."""
    next_revision = 1
    while True:
        try:
            async with aclosing(_watch(client, prefix, next_revision)) as answers:
                async for answer in answers:
                    if answer.compact_revision:
                        yield Change(answer.compact_revision, "gap")
                        next_revision = answer.compact_revision
                    for event in answer.events:
                        yield _change(event, prefix)
                        next_revision = event.kv.mod_revision + 1
        except FAILED:
            await asyncio.sleep(RETRY_S)


async def _watch(
    client: EtcdClient, prefix: str, revision: int
) -> AsyncGenerator[pb.WatchResponse, None]:
    await client.members()  # finds a member that answers
    channel = await client._connect()
    end = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
    request = pb.WatchCreateRequest(key=prefix.encode(), range_end=end, start_revision=revision)
    stub: services.WatchStub = services.WatchStub(channel)  # type: ignore[no-untyped-call]
    stream = stub.Watch()
    try:
        await stream.write(pb.WatchRequest(create_request=request))
        while True:
            # A member that was cut off says nothing: look for another one.
            async with asyncio.timeout(4 * CALL_S):
                answer = await stream.read()
            if not isinstance(answer, pb.WatchResponse) or answer.canceled:
                if isinstance(answer, pb.WatchResponse) and answer.compact_revision:
                    yield answer
                raise EtcdUnanswered("etcd ended the watch")
            yield answer
    except aio.AioRpcError as error:
        raise error_of(error, client.address) from error
    except TimeoutError as error:
        raise EtcdUnanswered("no change for a while") from error
    finally:
        stream.cancel()


def _change(event: pb.WatchEvent, prefix: str) -> Change:
    key = event.kv.key.decode().removeprefix(f"{prefix}/")
    change = Change(event.kv.mod_revision, key)
    if event.type == pb.WatchEvent.DELETE:
        return replace(change, removed=True)
    if key == "leader":
        return replace(change, epoch=int(json.loads(event.kv.value)["epoch"]))
    if key.startswith("jobs/"):
        body = json.loads(unpack(event.kv.value))
        return replace(change, epoch=int(body["epoch"]), sequence=int(body["sequence"]))
    return change


async def follow(job: str, token: str, addresses: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, path.open("a", buffering=1) as out:
        settings = issue(token, job, ["127.0.0.1"], Path(folder)).client_settings()
        client = EtcdClient(addresses.split(","), replace(settings, follow_members=True), CALL_S)
        async with aclosing(changes(client, job_prefix(job, token))) as found:
            async for change in found:
                out.write(json.dumps(asdict(change)) + "\n")


if __name__ == "__main__":
    job, token, addresses, path = sys.argv[1:]
    asyncio.run(follow(job, token, addresses, Path(path)))
