"""Ascend's profiling switch in a file, as it is mounted from a ConfigMap.

Looked at by the manager and, as long as there is no manager, by each worker.
"""

from __future__ import annotations

import json
import logging

from taskd.model.profiling import Part, parts_of
from taskd.runtime import small_file

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked at. A ConfigMap's own delay is a minute."""


class NotASwitch(ValueError):
    """The file says something else."""


class SwitchFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self._told = b""
        self._problem = ""

    def look(self) -> Part | None:
        """What it asks for, when it has changed. None: it has not, or it cannot be read."""
        try:
            text = small_file.read(self.path)
            if text == self._told:
                return None
            self._told = text
            told = json.loads(text)
            if not isinstance(told, dict):
                raise NotASwitch("it is no JSON object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                log.warning("the profiling switch %s cannot be read: %s", self.path, error)
            self._problem = str(error)
            return None
        self._problem = ""
        return parts_of(told)
