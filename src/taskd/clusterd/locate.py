"""Finds the clusterd of a running job, for commands on the same machine.

`taskd run` announces each job in a small file that only its user can read. `taskd status` and other
commands read it if neither --server nor TASKD_CLUSTERD is given.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.address import Address
from taskd.runtime.files import private_files as files
from taskd.runtime.tokens import ClientToken
from taskd.wire.json_reading import loads

PORT = 8899
PROBE_S = 2.0
"""How long a clusterd may take to accept a connection, if there are others to try."""


@dataclass(frozen=True, slots=True)
class Place:
    address: str
    job: str = ""
    token: str = ""
    pid: int = 0
    """The process that serves there; 0: unknown."""
    token_file: str = ""
    """Where the token was read, and is to be read again."""


def directory() -> Path:
    """Created if missing. Raises SettingsError if another user could have put files there."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    return files.make_private(Path(base) / "taskd" if base else files.user_folder())


def announce(job: str, address: str, token: str = "") -> Path:
    """Announce the job's clusterd for as long as this process runs."""
    path = _file(job)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(Place(address, job, token, os.getpid())), file)
    fresh.rename(path)
    return path


def withdraw(job: str) -> None:
    """Leaves the announcement of another process alone: it leads the job since."""
    path = _file(job)
    with suppress(OSError, ValueError, TypeError):
        if Place(**loads(path.read_text())).pid == os.getpid():
            path.unlink(missing_ok=True)


def announced() -> list[Place]:
    """All whose process still runs, newest first. Files of ended processes are removed."""
    places = []
    files = sorted(directory().glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)
    for path in files:
        try:
            place = Place(**loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if _is_running(place.pid):
            places.append(place)
        else:
            path.unlink(missing_ok=True)
    return places


def is_withdrawn(place: Place) -> bool:
    """Whether an announced clusterd has been shut down in order."""
    return place.pid != 0 and not _file(place.job).exists()


def find(job: str = "", server: str = "", token: str = "") -> Place:
    """The clusterd to ask. Raises SettingsError, which says what to do, if none is found."""
    address = server or environ.get("TASKD_CLUSTERD", "")
    token = token or environ.get("TASKD_CLUSTERD_TOKEN", "")
    if address:
        address = leading([one if ":" in one else f"{one}:{PORT}" for one in address.split(",")])
        file = "" if token else environ.get("TASKD_CLUSTERD_TOKEN_FILE", "")
        token = token or ClientToken(file=file).now() or _token_at(address)
        return Place(address, job, token, token_file=file)
    running = announced()
    places = [place for place in running if job in ("", place.job)]
    if not places:
        raise SettingsError([_not_found(job, [place.job for place in running])])
    return replace(places[0], address=leading(places[0].address.split(",")))


def leading(addresses: Sequence[str]) -> str:
    """Of several clusterds that share an etcd, the one that leads: only it listens."""
    parsed = [Address.parse(one) for one in addresses]
    for one in parsed if len(parsed) > 1 else ():
        with suppress(OSError), socket.create_connection((one.host, one.port), PROBE_S):
            return str(one)
    return str(parsed[0])


def _not_found(job: str, running: Sequence[str]) -> str:
    elsewhere = "for a job on another machine, give --server or set TASKD_CLUSTERD"
    if not job:
        return f"none of your jobs is running on this machine; {elsewhere}"
    here = f"running here: {', '.join(running)}" if running else "none of your jobs is running here"
    ended = f"taskd replay {job} --journal STATE_DIR/clusterd.journal"
    return (
        f"your job {job} is not running on this machine ({here}); {elsewhere}; for a job that has "
        f"ended, run `{ended}` (needs a run with --state-dir)"
    )


def _token_at(address: str) -> str:
    """The token of a server that one of our own jobs has announced."""
    try:
        return next((place.token for place in announced() if place.address == address), "")
    except SettingsError:
        return ""


def _file(job: str) -> Path:
    return directory() / f"{quote(job, safe='')}.json"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
