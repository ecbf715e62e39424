"""Sets up the `taskd.*` loggers: destinations, levels and format.

A line goes to a rotating file (`runtime/log_file.py`) and to standard output. `attach` raises
nothing and opens no file, so that it can be called at import. `taskd.python.utils.log` offers this
under its documented names; the manager, agents and others call `also_to` for their own file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TextIO

from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.runtime.log_file import RotatingHandler
from taskd.runtime.plain_text import one_line

ROOT = logging.getLogger("taskd")

FORMAT = (
    "[%(levelname)s]     %(asctime)s.%(msecs)06d %(process)d   "
    "%(filename)s:%(lineno)d     %(message)s"
)
DATE_FORMAT = "%Y/%m/%d %H:%M:%S"
MESSAGE_LIMIT = 1023
FILE_LIMIT_BYTES = 20 * 1024 * 1024
BACKUPS = 30


class Level(StrEnum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Read from the environment with the prefix `TASKD`."""

    log_path: str = "./taskd_log/"
    """Directory of the log files; created with mode 0750 when the first line is written."""

    file_log_level: Level = Level.INFO
    """The lowest level that goes to the file."""

    std_log_level: Level = Level.INFO
    """The lowest level that goes to standard output."""

    log_stdout: bool = True
    """Whether lines also go to standard output."""


def settings(environment: Mapping[str, str] = environ) -> tuple[LogSettings, list[str]]:
    """The settings, with the default for each invalid value, and the problems of those."""
    try:
        return load(LogSettings, environment), []
    except SettingsError as error:
        wrong = {problem.split(" ", 1)[0] for problem in error.problems}
        usable = {name: value for name, value in environment.items() if name not in wrong}
        return load(LogSettings, usable), error.problems


class OneLineFormatter(logging.Formatter):
    """One line per record, of limited length: text from a peer can neither forge lines nor fill
    the disk."""

    def __init__(self, fmt: str, max_length: int, datefmt: str | None = None) -> None:
        super().__init__(fmt, datefmt)
        self.max_length = max_length

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = one_line(record.message)
        if len(text) > self.max_length:
            text = text[: self.max_length] + "..."
        record.message = text
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        # Indented, so that no line of a traceback looks like a record.
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(line)}" for line in text.split("\n"))


class StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stdout`, also after it was replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


@cache
def attach() -> logging.Logger:
    """Send all `taskd.*` lines to the documented destinations. Further calls do nothing."""
    chosen, problems = settings()
    ROOT.setLevel(logging.DEBUG)
    also_to("taskd.log", chosen)
    if chosen.log_stdout:
        console = StdoutHandler()
        console.setLevel(chosen.std_log_level)
        console.setFormatter(OneLineFormatter(FORMAT, MESSAGE_LIMIT, DATE_FORMAT))
        ROOT.addHandler(console)
    if problems:
        sys.stderr.write(f"taskd: log settings replaced by defaults: {'; '.join(problems)}\n")
    return ROOT


def also_to(
    filename: str,
    chosen: LogSettings | None = None,
    logger: logging.Logger = ROOT,
    backups: int = BACKUPS,
) -> RotatingHandler:
    """Add a file of the log directory to a logger; the caller may remove the handler."""
    chosen = chosen or settings()[0]
    handler = RotatingHandler(
        Path(chosen.log_path) / filename, max_bytes=FILE_LIMIT_BYTES, backups=backups
    )
    handler.setLevel(chosen.file_log_level)
    handler.setFormatter(OneLineFormatter(FORMAT, MESSAGE_LIMIT, DATE_FORMAT))
    logger.addHandler(handler)
    return handler
