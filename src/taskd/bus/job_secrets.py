"""The secrets with which peers prove their positions on the bus: one, or those of a file.

The file is for the connections between machines. It can be changed while the job runs: it has one
secret per line, the first one is presented, and all of them are accepted.
"""

from __future__ import annotations

import logging
from pathlib import Path

from taskd.errors import SettingsError
from taskd.runtime.tokens import without_comment

log = logging.getLogger(__name__)


class JobSecrets:
    def __init__(self, secret: str, path: str = "") -> None:
        """Raises SettingsError if the file cannot be used. Without a path: only this secret."""
        self._path = Path(path) if path else None
        self._secrets: tuple[str, ...] = (secret,) if secret else ()
        self._problem = ""
        if self._path is not None:
            self._seen = self._mark()
            self._secrets = _read(self._path)

    @property
    def presented(self) -> str:
        """Empty: there is none."""
        self.renew()
        return self._secrets[0] if self._secrets else ""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Empty: peers are not checked."""
        self.renew()
        return self._secrets

    def renew(self) -> bool:
        """Read a changed file. Returns whether it now has other secrets."""
        if self._path is None or (mark := self._mark()) == self._seen:
            return False
        before, self._seen = self._secrets, mark
        try:
            self._secrets = _read(self._path)
        except SettingsError as error:
            if (problem := str(error)) != self._problem:
                self._problem = problem
                log.warning("the changed secrets are not used: %s", problem)
            return False
        self._problem = ""
        log.info(
            "secrets of the bus were renewed: file=%s secrets=%d", self._path, len(self._secrets)
        )
        return self._secrets != before

    def _mark(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> tuple[str, ...]:
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"cannot read the secrets of the bus from {path}: {error}"]) from error
    if mode & 0o077:
        log.warning("%s can be read or written by others: run chmod 600", path)
    secrets = tuple(word for line in text.splitlines() if (word := without_comment(line)))
    if not secrets:
        raise SettingsError([f"{path} contains no secret: write one per line, the newest first"])
    return secrets
