"""A launcher's part of the job's etcd as a process of its own, for tests.

It prints one JSON object per change of the members, and per sentence for people.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from taskd.agent.etcd_member.choice_messages import choice_key
from taskd.agent.etcd_member.etcd_binary import EtcdBinary, EtcdMemberSettings, find
from taskd.agent.etcd_member.job_authority import issue
from taskd.agent.etcd_member.job_etcd import JobEtcdPlan, job_etcd
from taskd.agent.etcd_member.member_keeper import MemberKeeper
from taskd.agent.node_resources import run_folders
from taskd.agent.run.own_etcd import make_folder
from taskd.bus.liveness_port import own_address
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic

TOKEN = "the job's secret"
PREFIX = "/job"


class MemberNode:
    """One such process, with everything that it has printed so far."""

    def __init__(
        self,
        seed: str,
        order: int,
        token: str = TOKEN,
        under: Sequence[str] = (),
        member: str = "",
    ) -> None:
        """`member`: one that it knows, of a cluster that it has been in."""
        self.name = f"node{order}"
        words = [self.name, str(order), seed, token, member]
        self.popen = subprocess.Popen(
            [*under, sys.executable, "-m", __name__, *words], stdout=subprocess.PIPE, text=True
        )
        self.facts: dict[str, Any] = {}
        self.said: list[str] = []

    def wait(self, condition: Callable[[MemberNode], object]) -> None:
        """Read what it prints until the condition holds. The test's own time limit is the limit."""
        assert self.popen.stdout is not None
        while not condition(self):
            line = self.popen.stdout.readline()
            assert line, f"{self.name} has ended: {self.facts} {self.said}"
            found = json.loads(line)
            self.said += [found["said"]] if "said" in found else []
            self.facts |= found

    def wait_for_voters(self, *orders: int) -> None:
        def reached(node: MemberNode) -> bool:
            voters = [name.partition("-")[0] for name in node.facts.get("voters", [])]
            return voters == [f"node{order}" for order in orders]

        self.wait(reached)

    @property
    def settings(self) -> EtcdSettings:
        files = {name: self.facts[name] for name in ("ca", "crt", "key")}
        return EtcdSettings(**files, follow_members=True)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@contextmanager
def cluster(seed: str, count: int) -> Iterator[list[MemberNode]]:
    """Nodes that have all become members."""
    nodes: list[MemberNode] = []
    try:
        for order in range(count):
            nodes.append(MemberNode(seed, order))
        for node in nodes:
            node.wait_for_voters(*range(count))
        yield nodes
    finally:
        for node in nodes:
            node.close()


async def serve(plan: JobEtcdPlan) -> None:
    def tell(**facts: object) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with job_etcd(plan, lambda text: tell(said=text)) as keeper:
        files = asdict(plan.certificate) if plan.certificate else {}
        tell(client=keeper.me.client, began=monotonic(), **files)
        before = None
        while not stop.is_set():
            if (now := _facts(keeper)) != before:
                tell(**now)
                before = now
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.05)


def _facts(keeper: MemberKeeper) -> dict[str, Any]:
    return {
        "voters": sorted(one.name for one in keeper.members if not one.is_learner),
        "joined": keeper.joined.is_set(),
        "pid": keeper.process.pid,
    }


def main(words: Sequence[str]) -> None:
    name, order, seed, token, member = words
    binary = find(EtcdMemberSettings(), encrypted=bool(token))
    assert isinstance(binary, EtcdBinary), binary
    with run_folders() as (run_dir, shared):
        folder = make_folder("", shared, run_dir)
        address = Address.parse(seed)
        hosts = [own_address(address), address.host]
        plan = JobEtcdPlan(
            binary=binary,
            job="job",
            name=name,
            order=int(order),
            first=order == "0" and not member,
            home=address,
            at_home=order == "0",
            seeds=(Address.parse(member or seed),),
            folder=folder,
            certificate=issue(token, "job", hosts, folder) if token else None,
            prefix=PREFIX,
            choice_key=choice_key("job", token),
        )
        asyncio.run(serve(plan))


if __name__ == "__main__":
    main(sys.argv[1:])
