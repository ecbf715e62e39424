"""What stands behind `init_taskd_worker`, `start_taskd_worker` and `destroy_taskd_worker`.

    init      who we are and how much may be kept; nothing runs yet
    start     on the bus, through the process's one connection (`line.py`)
    destroy   off the bus; what is recorded is written to its files

In any order, as often as one likes, without a signal handler, with or without Ascend's libraries.
What is recorded is done by `profiling.py` at the end of a training step. As long as no manager
has been found, the switch is looked for in Ascend's file. Stress tests and link switches are the
vendor's (`ascend.py`), unless in-process recovery has its own
(`torch/operations/parked_operations.py`).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from functools import partial

from taskd import config
from taskd.ascend.switch_file import LOOK_S, SwitchFile
from taskd.bus.endpoint import BusConfig
from taskd.errors import SettingsError
from taskd.model import messages as m
from taskd.model.ids import Rank, worker
from taskd.model.profiling import FAILED, NOTHING, OFF, names_of, parts_ordered
from taskd.worker import bus_connection as line
from taskd.worker.bus_connection import Rider, Say
from taskd.worker.operations import ascend_calls as ascend
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.operations.stress_order import StressTester
from taskd.worker.profiling import profiler as profiling
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

PROXY = "127.0.0.1:9602"


@dataclass(frozen=True, slots=True)
class Identity:
    rank: int
    node: int
    limit_mb: int
    framework: str


class Worker:
    """Rides on the process's connection."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._say: Say | None = None
        self._managed = threading.Event()
        self._operations: tuple[Rider, ...] = ()

    def operate(self) -> None:
        """Whoever asks for a stress test or a link switch gets an answer, from now on."""
        rank, framework = Rank(self.identity.rank), self.identity.framework
        self._operations = (
            StressTester(rank, ascend.operations(framework)),
            NicSwitcher(partial(ascend.switch, framework)),
        )

    def watch(self, file: SwitchFile) -> None:
        """Until the manager, which looks at the file for all, is found."""
        self._managed = threading.Event()
        threading.Thread(
            target=self._watch, args=(file, self._managed), name="taskd-switch", daemon=True
        ).start()

    def unwatch(self) -> None:
        self._managed.set()

    def _watch(self, file: SwitchFile, managed: threading.Event) -> None:
        while not managed.wait(LOOK_S):
            if (parts := file.look()) is not None:
                log.info("%s asks to record %s", file.path, ", ".join(names_of(parts)) or "nothing")
                profiling.of_process().request(parts)

    def joined(self, say: Say) -> None:
        self.unwatch()
        self._say = say
        say(m.WorkerRegistered())
        self.report()
        for operation in self._operations:
            operation.joined(say)

    def heard(self, body: m.Body) -> None:
        for operation in self._operations:
            if not line.carries(type(operation)):  # in-process recovery answers for itself
                operation.heard(body)
        if isinstance(body, m.SetProfiling):
            ours = profiling.of_process()
            wanted = parts_ordered(body.default_domain, body.communication, body.parts)
            ours.request(wanted)
            # Said again, an order that holds already is answered at once.
            if int(wanted) == ours.applied or not self._can_follow(ours):
                self.report()

    def report(self) -> None:
        """Tell the manager how both domains fare."""
        if self._say is None:
            return
        ours = profiling.of_process()
        states = ours.states()
        if not self._can_follow(ours) and ours.page.wanted != NOTHING:
            log.warning("%s is not installed: nothing is recorded", self.identity.framework)
            states = FAILED, FAILED if ours.page.wanted & 1 else OFF
        self._say(m.ProfilingSet(*states))

    def _can_follow(self, ours: profiling.Profiler) -> bool:
        return profiling.steps_are_seen or ours.library is not None


_worker: Worker | None = None
_started = False


def init(rank: int, node: int, limit_mb: int, framework: str) -> bool:
    global _worker
    identity = Identity(rank, node, limit_mb, framework)
    try:
        ours = profiling.of_process()
    except SettingsError as error:
        log.error("the worker is not initialised: %s", error)
        return False
    ours.rank = rank
    ours.limit(limit_mb)
    if _worker is None:
        _worker = Worker(identity)
    elif _worker.identity != identity:
        moved = replace(_worker.identity, limit_mb=limit_mb) != identity
        if moved and _started:
            log.warning("the worker keeps its place on the bus: destroy it before moving it")
        else:
            _worker.identity = identity
    return True


def start() -> bool:
    global _started
    if _worker is None:
        return False
    settings, who = config.load(WorkerSettings), _worker.identity
    bus = BusConfig(
        me=worker(who.node, who.rank),
        upstream=settings.proxy or PROXY,
        job=settings.job_id or config.environ.get("MINDX_TASK_ID", ""),
        token=settings.token,
    )
    if not _started:
        profiling.of_process().listen(_worker.report)
        _started = True
        _worker.operate()
        _worker.watch(SwitchFile(profiling.of_process().settings.switch))
    line.board(_worker, bus)
    return True


def destroy() -> bool:
    global _started
    if _worker is None:
        return False
    if _started:
        ours = profiling.of_process()
        ours.unlisten(_worker.report)
        ours.save()
        _worker.unwatch()
        line.leave(_worker)
        _started = False
    return True
