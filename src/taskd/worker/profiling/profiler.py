"""The profiler of one training process: what is wanted, and what is being recorded.

The agent (through shared memory), the manager (over the bus) or Ascend's switch file set which
parts are wanted. At the end of each step the training thread compares that with what is recorded
and switches there, where no part of a step is in progress; an unprofiled job pays for this one
comparison only. The framework's hooks (`torch/profiling/step_recorder.py`) are installed only while
something is recorded. Where Ascend's library is installed, it records instead of the hooks.
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
from taskd.runtime.files.profiling_files import SharedSwitch
from taskd.worker.profiling import tcp_counters
from taskd.worker.profiling.record_files import RecordFiles, base_dir
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.settings import ProfilingSettings, WorkerSettings

log = logging.getLogger(__name__)


class Hooks(Protocol):
    """The hooks of a framework. All calls come from its training thread, between two steps."""

    def install(self, parts: Part, recorder: Recorder) -> None: ...

    def remove(self) -> None: ...

    @property
    def installed(self) -> bool: ...

    def step_ended(self, number: int) -> None:
        """Called only while the hooks are installed."""


steps_are_seen = False
"""Whether a framework reports the end of its steps; set by `StepEndHook`."""


class Profiler:
    """One per process: see `of_process`."""

    def __init__(self, settings: ProfilingSettings, job: str, rank: int, incarnation: int) -> None:
        self.settings = settings
        self.page = _page(settings.probe)
        self.applied = int(NOTHING)
        """What was last tried. Compared with the page's word at the end of every step."""
        self.recorder: Recorder | None = None
        self.limit_mb = settings.limit_mb
        self.rank = rank
        self._job, self._incarnation = job, incarnation
        self._problem = self._reported_problem = ""
        self._listeners: list[Callable[[], None]] = []
        self._changing = threading.RLock()
        self._library: Library | None = None
        self._searched = False

    @property
    def library(self) -> Library | None:
        """Ascend's library, if it is installed. Then no hooks are installed."""
        if self._library is None and not self._searched:
            self._searched = True
            self._library = mspti.find(self.settings.mspti)
        return self._library

    def request(self, parts: Part) -> None:
        """Set what is wanted. The library follows at once, hooks at the end of the step."""
        self.page.want(parts)
        if self.library is not None:
            self.apply(None)

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed`, from any thread, after a request was tried or its success changed."""
        self._listeners.append(changed)

    def unlisten(self, changed: Callable[[], None]) -> None:
        self._listeners.remove(changed)

    def limit(self, limit_mb: int) -> None:
        """Set the size limit for the records of all ranks of this node together."""
        self.limit_mb = limit_mb
        if self.recorder is not None:
            self.recorder.files = self._files()

    def save(self) -> None:
        """Write all records to disk and wait until that is done."""
        if self.recorder is not None:
            self.recorder.flush()

    def apply(self, hooks: Hooks | None) -> None:
        """Switch to what is wanted. An error ends profiling, never the training."""
        with self._changing:
            wanted = self.page.wanted
            self.applied = self.page.word[0]
            self._problem = ""
            try:
                self._change(wanted, hooks)
            except Exception as error:
                log.exception("profiling has failed; training continues")
                self._problem = f"{type(error).__name__}: {error}"
                if hooks is not None:
                    hooks.remove()
            self._reported_problem = self.problem
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
        """States of the default and the communication domain, as in the message code 14DC."""
        wanted = self.page.wanted
        return tuple(  # type: ignore[return-value]
            FAILED if self.problem and wanted & domain else ON if self.recorded & domain else OFF
            for domain in (DEFAULT_DOMAIN, Part.COMMUNICATION)
        )

    def pace(self) -> Pace:
        recorder, identity = self.recorder, (Rank(self.rank), Incarnation(self._incarnation))
        if recorder is None:
            return Pace(*identity, self.recorded, self.problem)
        totals = recorder.timer.totals
        return Pace(
            *identity,
            self.recorded,
            self.problem,
            totals.steps,
            totals.total_s,
            totals.wait_s,
            totals.data_s,
            totals.save_s,
            totals.collectives,
            tcp_counters.of_process(),
        )

    def _new_recorder(self) -> Recorder:
        return Recorder(self._files(), self.settings.save_s, self._publish)

    def _files(self) -> RecordFiles:
        return RecordFiles(base_dir(self.settings.dir), self._job, self.rank, self.limit_mb)

    def _publish(self) -> None:
        """Publish the pace and any problem. The recorder calls this once per second."""
        if self.problem != self._reported_problem:
            self._reported_problem = self.problem
            self._changed()
        try:
            self.page.publish_pace(self.pace())
        except OSError as error:
            log.debug("the pace is not published: %s", error)


_profiler: Profiler | None = None
_profiler_pid = 0


def of_process() -> Profiler:
    """The profiler of this process; a forked child gets its own."""
    global _profiler, _profiler_pid
    if _profiler is None or _profiler_pid != os.getpid():
        settings = config.load(ProfilingSettings, prefix="TASKD_PROFILING")
        worker = config.load(WorkerSettings)
        job = config.environ.get("MINDX_TASK_ID") or worker.job_id
        rank = int(config.environ.get("RANK") or "0")
        name = job or f"default_task_id_{int(wall())}"
        _profiler = Profiler(settings, name, rank, worker.incarnation)
        _profiler_pid = os.getpid()
    return _profiler


def _page(path: str) -> SharedSwitch:
    try:
        return SharedSwitch(path)
    except OSError as error:
        log.warning("the agent cannot control profiling of this process: %s", error)
        return SharedSwitch()


class StepEndHook:
    """Called at the end of every training step, one per process.

    Each framework has a hook that knows when a step has ended (`torch/profiling/optimizer_hook.py`,
    `mindspore/callback_hook.py`). A forked child starts with a new one.
    """

    def __init__(self, hooks: Hooks) -> None:
        global steps_are_seen
        steps_are_seen = True
        self.hooks = hooks
        self.number = 0
        self._profiler: Profiler | None = None
        self._counted = 0

    def step_ended(self, source: int) -> None:
        """`source` identifies the optimizer or cell; only steps of the first one are counted."""
        profiler = self._profiler
        if profiler is None:
            profiler = self._profiler = of_process()
            self._counted = source
        if source != self._counted:
            return
        self.number += 1
        if self.hooks.installed:
            self.hooks.step_ended(self.number)
        if profiler.page.word[0] != profiler.applied:
            profiler.apply(self.hooks)
