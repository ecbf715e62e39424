"""Where the members of a running job's etcd are, in a file of this machine.

A launcher that is started again finds the job with it, also if its node was the first one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.files import make_private, user_folder, write_private


@dataclass
class RunningJob:
    path: Path | None
    """None: this machine has no folder for it."""
    _saved: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, job: str) -> RunningJob:
        key = environ.get("TASKD_TOKEN", "").encode()[: blake2b.MAX_KEY_SIZE]
        name = blake2b(job.encode(), digest_size=12, key=key).hexdigest()
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
            found = json.loads(self.path.read_text()) if self.path is not None else []
        except (OSError, ValueError):
            return ()
        return tuple(str(one) for one in found) if isinstance(found, list) else ()

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
