"""The switch of one training process: what is asked for, and whether it is recorded.

Whoever may ask (the agent through shared memory, the manager over the bus, Ascend's switch file)
writes one word. The training thread looks at it at the end of each step and changes over there,
where nothing of the step is in flight; the framework's hooks (`torch/profiling/step_recorder.py`)
are only there while something is recorded. Where Ascend's library is installed, it records in
their place.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from taskd import config
from taskd.ascend import mspti
from taskd.ascend.mspti import Library
from taskd.model.ids import Incarnation, Rank
from taskd.model.profiling import DEFAULT_DOMAIN, FAILED, NOTHING, OFF, ON, Pace, Part
from taskd.runtime.clock import wall
from taskd.runtime.profiling_files import Page
from taskd.worker.profiling import link_counters as wires
from taskd.worker.profiling.record_files import Shelf, base_dir
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.settings import ProfilingSettings, WorkerSettings

log = logging.getLogger(__name__)


class Hooks(Protocol):
    """What a framework offers. Both are called on its training thread, between two steps."""

    def install(self, parts: Part, recorder: Recorder) -> None: ...

    def remove(self) -> None: ...


steps_are_seen = False
"""Whether a framework tells us the end of its steps; set by `glance.py`."""


class Profiling:
    """One a process: see `of_process`."""

    def __init__(self, settings: ProfilingSettings, job: str, rank: int, incarnation: int) -> None:
        self.settings = settings
        self.page = _page(settings.probe)
        self.applied = int(NOTHING)
        """What was last tried. Compared with the page's word at the end of every step."""
        self.recorder: Recorder | None = None
        self.limit_mb = settings.limit_mb
        self.rank = rank
        self._job, self._incarnation = job, incarnation
        self._problem = self._told_problem = ""
        self._listeners: list[Callable[[], None]] = []
        self._changing = threading.RLock()
        self._library: Library | None = None
        self._looked = False

    @property
    def library(self) -> Library | None:
        """Ascend's, where it is installed: then it does the recording, and no hook is put in."""
        if self._library is None and not self._looked:
            self._looked = True
            self._library = mspti.find(self.settings.mspti)
        return self._library

    def ask(self, parts: Part) -> None:
        """The library obeys at once, hooks at the end of the step."""
        self.page.want(parts)
        if self.library is not None:
            self.follow(None)

    def listen(self, changed: Callable[[], None]) -> None:
        """Be told, in any thread, when what was asked for has been tried, succeeds or fails."""
        self._listeners.append(changed)

    def unlisten(self, changed: Callable[[], None]) -> None:
        self._listeners.remove(changed)

    def limit(self, limit_mb: int) -> None:
        """What all ranks of the node may keep together, from now on."""
        self.limit_mb = limit_mb
        if self.recorder is not None:
            self.recorder.shelf = self._shelf()

    def save(self) -> None:
        """Bring to disk what has been recorded so far, and wait until that is done."""
        if self.recorder is not None:
            self.recorder.flush()

    def follow(self, hooks: Hooks | None) -> None:
        """Change over to what is wanted. We must never be what kills training."""
        with self._changing:
            wanted = self.page.wanted
            self.applied = self.page.word[0]
            self._problem = ""
            try:
                self._change(wanted, hooks)
            except Exception as error:
                log.exception("profiling is given up; training goes on")
                self._problem = f"{type(error).__name__}: {error}"
                if hooks is not None:
                    hooks.remove()
            self._told_problem = self.problem
        self._changed()

    def _changed(self) -> None:
        for changed in tuple(self._listeners):
            changed()

    def _change(self, wanted: Part, hooks: Hooks | None) -> None:
        library = self.library
        if hooks is not None:
            hooks.remove()
        if wanted:
            self.recorder = self.recorder or self._new_recorder()
            if library is not None:
                self.recorder.source = library.drain
                library.record(wanted)
            elif hooks is not None:
                hooks.install(wanted, self.recorder)
        elif self.recorder is not None:
            if library is not None:
                library.record(wanted)
            self.recorder.end()
            self.recorder = None

    @property
    def recorded(self) -> Part:
        return NOTHING if self._problem else Part(self.applied & 31)

    @property
    def problem(self) -> str:
        return self._problem or (self.recorder.problem if self.recorder is not None else "")

    def states(self) -> tuple[int, int]:
        """Of the default domain and of communication, as in the code 14DC."""
        wanted = self.page.wanted
        return tuple(  # type: ignore[return-value]
            FAILED if self.problem and wanted & domain else ON if self.recorded & domain else OFF
            for domain in (DEFAULT_DOMAIN, Part.COMMUNICATION)
        )

    def pace(self) -> Pace:
        recorder, identity = self.recorder, (Rank(self.rank), Incarnation(self._incarnation))
        if recorder is None:
            return Pace(*identity, self.recorded, self.problem)
        sums = recorder.watch.sums
        return Pace(
            *identity,
            self.recorded,
            self.problem,
            sums.steps,
            sums.total_s,
            sums.wait_s,
            sums.data_s,
            sums.save_s,
            sums.collectives,
            wires.of_process(),
        )

    def _new_recorder(self) -> Recorder:
        return Recorder(self._shelf(), self.settings.save_s, self._tell)

    def _shelf(self) -> Shelf:
        return Shelf(base_dir(self.settings.dir), self._job, self.rank, self.limit_mb)

    def _tell(self) -> None:
        """Once a second, by the recorder: the pace, and whether the records are still kept."""
        if self.problem != self._told_problem:
            self._told_problem = self.problem
            self._changed()
        try:
            self.page.tell(self.pace())
        except OSError as error:
            log.debug("the pace is not told: %s", error)


_ours: Profiling | None = None
_ours_in = 0


def of_process() -> Profiling:
    """This process's own; a forked child has another."""
    global _ours, _ours_in
    if _ours is None or _ours_in != os.getpid():
        settings = config.load(ProfilingSettings, prefix="TASKD_PROFILING")
        worker = config.load(WorkerSettings)
        job = config.environ.get("MINDX_TASK_ID") or worker.job_id
        rank = int(config.environ.get("RANK") or "0")
        name = job or f"default_task_id_{int(wall())}"
        _ours, _ours_in = Profiling(settings, name, rank, worker.incarnation), os.getpid()
    return _ours


def _page(path: str) -> Page:
    try:
        return Page(path)
    except OSError as error:
        log.warning("the agent cannot switch profiling of this process: %s", error)
        return Page()
