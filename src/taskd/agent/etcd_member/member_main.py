"""The process that keeps this node's member of the job's etcd: a child of the launcher.

    python -m taskd.agent.etcd_member.member_main PLAN

PLAN is a JSON object (`MemberTask`). The job's token is in the environment. The process dies with
its launcher, and etcd with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from taskd.agent.etcd_member.choice_messages import choice_key
from taskd.agent.etcd_member.etcd_binary import EtcdBinary
from taskd.agent.etcd_member.job_authority import Certificate
from taskd.agent.etcd_member.job_etcd import JobEtcdPlan, job_etcd
from taskd.agent.etcd_member.running_job import RunningJob
from taskd.agent.process_lifetime import name_process
from taskd.clusterd.etcd.job_terms import job_prefix
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.address import Address
from taskd.wire.json_reading import loads


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberTask:
    binary: str
    version: str
    job: str
    name: str
    order: int
    first: bool
    home: str
    at_home: bool
    seeds: tuple[str, ...]
    folder: str
    certificate: tuple[str, str, str] | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MemberTask:
        body = loads(text)
        files = body.pop("certificate")
        seeds = tuple(body.pop("seeds"))
        return cls(**body, seeds=seeds, certificate=tuple(files) if files else None)

    def plan(self, known: tuple[str, ...] = ()) -> JobEtcdPlan:
        """`known`: the members that this machine has seen last; those of the start may be gone."""
        token = environ.get("TASKD_TOKEN", "")
        return JobEtcdPlan(
            binary=EtcdBinary(self.binary, self.version),
            job=self.job,
            name=self.name,
            order=self.order,
            first=self.first,
            home=Address.parse(self.home),
            at_home=self.at_home,
            seeds=tuple(map(Address.parse, dict.fromkeys((*self.seeds, *known)))),
            folder=Path(self.folder),
            certificate=Certificate(*self.certificate) if self.certificate else None,
            prefix=job_prefix(self.job, token),
            choice_key=choice_key(self.job, token),
        )


async def keep(task: MemberTask) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    running = RunningJob.of(task.job, task.home)
    async with job_etcd(task.plan(running.addresses()), say) as keeper:
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            turn = asyncio.create_task(keeper.turned())
            await asyncio.wait({stopping, turn}, return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            if keeper.joined.is_set():
                running.save(keeper.addresses)
        running.forget()


def say(text: str) -> None:
    sys.stderr.write(f"taskd: {text}\n")
    sys.stderr.flush()


def main() -> None:
    name_process("taskd:etcd")
    logging.basicConfig(level="WARNING", format="taskd: %(message)s")
    try:
        asyncio.run(keep(MemberTask.from_json(sys.argv[1])))
    except SettingsError as error:
        sys.exit(f"taskd: {error}")


if __name__ == "__main__":
    main()
