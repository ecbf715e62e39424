"""Where a worker's files are, and where its streams go, as with torchrun.

    <log dir>/<run id>_<random>/attempt_<incarnation>/<local rank>/
        stdout.log, stderr.log, error.json, result.json

Without `--log-dir` the same tree is created in a directory that is removed when the job ends.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

from taskd.agent.run.plan import ERR, OUT, Plan
from taskd.agent.worker_output import Sink, WorkerOutput
from taskd.model.agent import StartWorker
from taskd.model.ids import Incarnation, Rank
from taskd.wire.json_reading import loads

EVIDENCE_CHARS = 4000
_OF_LEAKS = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")
"""What torch's bindings print when a process exits with an error."""
_STREAMS = ((OUT, 1, "stdout"), (ERR, 2, "stderr"))


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one incarnation of one rank."""

    folder: Path

    @property
    def error(self) -> Path:
        return self.folder / "error.json"

    @property
    def stacks(self) -> Path:
        return self.folder / "stacks.txt"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def devices(self) -> Path:
        return self.folder / "devices.json"

    def log(self, stream: str) -> Path:
        return self.folder / f"{stream}.log"


class WorkerLogs:
    def __init__(self, plan: Plan, run_dir: str) -> None:
        self._plan = plan
        root = plan.logs.directory
        if root:
            os.makedirs(root, exist_ok=True)
        prefix = f"{plan.run_id}_".replace("/", "_")
        self._root = Path(tempfile.mkdtemp(prefix=prefix, dir=root)) if root else Path(run_dir)

    def files(self, rank: Rank, incarnation: Incarnation) -> Files:
        _, local_rank = self._plan.node_and_local_rank(rank)
        folder = self._root / f"attempt_{incarnation}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return Files(folder)

    def open(self, start: StartWorker, output: WorkerOutput) -> list[int]:
        """The file descriptors for the worker's stdout and stderr; close them after its start."""
        files = self.files(start.rank, start.incarnation)
        _, local_rank = self._plan.node_and_local_rank(start.rank)
        logs = self._plan.logs
        redirects, tee = logs.redirects.get(local_rank, 0), logs.tee.get(local_rank, 0)
        shown = logs.shown is None or local_rank in logs.shown
        ends: list[int] = []
        for bit, console, name in _STREAMS:
            path = str(files.log(name))
            if redirects & bit and not tee & bit:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                ends.append(os.open(path, flags, 0o644))
                continue
            words = (
                (logs.stdout_filters if bit == OUT else logs.stderr_filters) if tee & bit else ()
            )
            sink = Sink(
                prefix=self._prefix(start, local_rank, bool(tee & bit)),
                console=console if shown else None,
                path=path if tee & bit else "",
                collect=str(files.folder.parent / f"filtered_{name}.log"),
                words=tuple(word.encode() for word in words),
            )
            ends += output.open((start.rank, start.incarnation), (sink,))
        return ends

    def _prefix(self, start: StartWorker, local_rank: int, teed: bool) -> bytes:
        if template := self._plan.logs.line_prefix:
            text = Template(template).safe_substitute(
                role_name=self._plan.role,
                rank=start.rank,
                local_rank=local_rank,
                hostname=socket.gethostname(),
            )
        elif teed:
            text = f"[{self._plan.role}{local_rank}]:"
        else:
            text = self._plan.prefix.format(rank=start.rank)
        return text.encode()

    def evidence(self, start: StartWorker, tail: str) -> str:
        """The worker's last lines, and its traceback if it has written one that is not in them."""
        files = self.files(start.rank, start.incarnation)
        if not tail:
            tail = "".join(_end_of(files.log(name)) for _, _, name in _STREAMS)
        text = end_with_error(tail, _traceback(files.error))
        if _is_full(files.folder):
            text = f"{text}\nthe disk is full: no space left for logs in {files.folder}"
        return text.strip()[-EVIDENCE_CHARS:]


def end_with_error(tail: str, trace: str) -> str:
    """The last lines, up to the error that ended the script; `trace` is its traceback, if known.

    Libraries print more while the interpreter exits, such as lists of objects that leak.
    """
    error = trace.rstrip().rpartition("\n")[2]
    if not error:
        lines = (line for line in tail.splitlines() if not _OF_LEAKS.match(line))
        return "\n".join(lines).strip()
    printed = tail.rfind(error)
    text = f"{tail}\n{trace}" if printed < 0 else tail[: printed + len(error)]
    return text.strip()


def _traceback(path: Path) -> str:
    try:
        message = loads(path.read_text())["message"]
        return message if isinstance(message, str) else str(message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - EVIDENCE_CHARS))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
