"""Where the members of a running job's etcd are, in a file of this machine.

A launcher that is started again finds the job with it, also if its node was the first one. It must
not start another etcd while the job may run: there would be two leaders. So it waits until one of
the members answers, or until all of them refuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from taskd.bus import liveness_port
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_settings import EtcdAccess
from taskd.clusterd.etcd.job_terms import JobTerms
from taskd.config import environ
from taskd.core.record import StoreUnreachable
from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic
from taskd.runtime.files.private_files import make_private, user_folder, write_private
from taskd.runtime.retry import Tries, every
from taskd.wire.json_reading import loads

LOOK_S, ANSWER_S = 0.2, 0.5
REFUSED_S = 4.0
"""How long all members must refuse: one that has died is started again within a second."""
PATIENT_S = 3.0
"""How long to wait before saying so."""


@dataclass
class RunningJob:
    path: Path | None
    """None: this machine has no folder for it."""
    _saved: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, job: str, home: str) -> RunningJob:
        """`home`: where its nodes meet. Two jobs of the usual name are told apart by it."""
        key = environ.get("TASKD_TOKEN", "").encode()[: blake2b.MAX_KEY_SIZE]
        name = blake2b(f"{job} {home}".encode(), digest_size=12, key=key).hexdigest()
        try:
            return cls(make_private(user_folder()) / f"etcd-{name}.json")
        except SettingsError:
            return cls(None)

    def save(self, addresses: tuple[str, ...]) -> None:
        if self.path is not None and addresses and addresses != self._saved:
            write_private(self.path, json.dumps(addresses))
            self._saved = addresses

    def addresses(self) -> tuple[str, ...]:
        """Empty: no such job has run here, or it has ended."""
        try:
            found = loads(self.path.read_text()) if self.path is not None else []
        except (OSError, ValueError):
            return ()
        return tuple(str(one) for one in found) if isinstance(found, list) else ()

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


async def still_runs(
    access: EtcdAccess, prefix: str, within_s: float, say: Callable[[str], None]
) -> bool:
    """Whether the job whose etcd had these members runs. It may have no leader at the moment.

    False: the job has ended, or all members refuse, so none of them runs any more. Raises
    SettingsError if neither can be known in time.
    """
    client = EtcdClient(access.addresses, access.settings, ANSWER_S)
    began = monotonic()
    may_live, said = began, False
    try:
        async for _ in Tries(every(LOOK_S), deadline=began + within_s):
            try:
                seen = await JobTerms(client, prefix).look()
                return not seen.ended or seen.ended != seen.epoch
            except StoreUnreachable as error:
                problem = str(error)
            ports = [liveness_port.is_open(one, ANSWER_S) for one in client.addresses]
            if any(answer is not False for answer in await asyncio.gather(*ports)):
                may_live = monotonic()
            elif monotonic() - may_live > REFUSED_S:
                return False
            if not said and monotonic() - began > PATIENT_S:
                said = True
                say(f"this machine has run a node of this job, which may still run: {problem}")
    finally:
        await client.close()
    raise SettingsError(
        [
            "this machine has run a node of this job, and its etcd does not answer at "
            f"{', '.join(client.addresses)}: two jobs of one name must not run. Start this node "
            "when the others can be reached, or start the job with another --job-id"
        ]
    )
