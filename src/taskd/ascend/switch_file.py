"""Ascend's profiling switch file, which is mounted from a ConfigMap.

The manager reads it; until a manager is connected, each worker does.
"""

from __future__ import annotations

import logging

from taskd.model.profiling import Part, parts_of
from taskd.runtime.files import private_files as files
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is read. A change of the ConfigMap itself takes up to a minute to arrive."""


class NotASwitch(ValueError):
    """The file does not contain a JSON object."""


class SwitchFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self._text = b""
        self._problem = ""

    def look(self) -> Part | None:
        """The requested parts if the file has changed. None: no change, or it cannot be read."""
        try:
            text = files.read_small(self.path)
            if text == self._text:
                return None
            self._text = text
            switch = loads(text)
            if not isinstance(switch, dict):
                raise NotASwitch("expected a JSON object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                log.warning("the profiling switch %s cannot be read: %s", self.path, error)
            self._problem = str(error)
            return None
        self._problem = ""
        return parts_of(switch)
