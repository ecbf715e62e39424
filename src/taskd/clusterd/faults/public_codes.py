"""The file that says who may report public faults, and which level each code has.

Read again when it changes. Ascend's ClusterD has it at the two default places.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from taskd.core.clusterd.fault_centre.public_faults import PublicCodes, codes_of
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

PLACES = (
    Path("/user1/mindx-dl/clusterd/publicCustomization.json"),
    Path("/home/hwMindX/publicFaultConfiguration.json"),
)


class PublicCodeFile:
    def __init__(self, places: Sequence[Path] = PLACES) -> None:
        self._places = places
        self._mark: object = None
        self._codes = PublicCodes()

    def codes(self) -> PublicCodes:
        """Of the first file that can be used; without one, no code is known."""
        mark = [_mark(path) for path in self._places]
        if mark != self._mark:
            self._mark = mark
            self._codes = self._load()
        return self._codes

    @property
    def missing(self) -> str:
        """What a reporter learns whose codes are unknown."""
        if self._codes.levels:
            return ""
        return f"clusterd has no list of codes ({' or '.join(map(str, self._places))})"

    def _load(self) -> PublicCodes:
        for path in self._places:
            try:
                codes = codes_of(loads(path.read_text()))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.error("codes of public faults: %s is not used: %s", path, error)
                continue
            log.info("codes of public faults: file=%s codes=%d", path, len(codes.levels))
            return codes
        return PublicCodes()


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
