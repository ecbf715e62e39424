"""The code behind `init_taskd_worker`, `start_taskd_worker` and `destroy_taskd_worker`.

    init      stores rank, node and size limit; nothing runs yet
    start     joins the bus through the process's one connection (`bus_connection.py`)
    destroy   leaves the bus; all records are written to their files

They may be called in any order and repeatedly, need no signal handler, and work without Ascend's
libraries. `profiling/profiler.py` records. Until a manager is connected, Ascend's switch file
controls it. Stress tests and NIC switches are done by Ascend's packages
(`operations/ascend_calls.py`), unless in-process recovery handles them
(`torch/operations`).
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
from taskd.worker import bus_connection
from taskd.worker.bus_connection import Send, Subscriber
from taskd.worker.operations import ascend_calls
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.operations.stress_order import StressTester
from taskd.worker.profiling import profiler
from taskd.worker.profiling.profiler import Profiler
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

PROXY = "127.0.0.1:9602"


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The arguments of `init_taskd_worker`, and the node's rank."""

    rank: int
    node: int
    limit_mb: int
    framework: str


class Worker:
    """A subscriber of the process's bus connection."""

    def __init__(self, arguments: WorkerArguments) -> None:
        self.arguments = arguments
        self._send: Send | None = None
        self._managed = threading.Event()
        self._operations: tuple[Subscriber, ...] = ()

    def accept_operations(self) -> None:
        """Answer orders for stress tests and NIC switches from now on."""
        rank, framework = Rank(self.arguments.rank), self.arguments.framework
        self._operations = (
            StressTester(rank, ascend_calls.operations(framework)),
            NicSwitcher(partial(ascend_calls.switch, framework)),
        )

    def watch(self, file: SwitchFile) -> None:
        """Follow the switch file until a manager is connected, which then reads it for all."""
        self._managed = threading.Event()
        threading.Thread(
            target=self._watch, args=(file, self._managed), name="taskd-switch", daemon=True
        ).start()

    def unwatch(self) -> None:
        self._managed.set()

    def _watch(self, file: SwitchFile, managed: threading.Event) -> None:
        while not managed.wait(LOOK_S):
            if (parts := file.look()) is not None:
                names = ", ".join(names_of(parts)) or "nothing"
                log.info("the switch file %s requests to record: %s", file.path, names)
                profiler.of_process().request(parts)

    def joined(self, send: Send) -> None:
        self.unwatch()
        self._send = send
        send(m.WorkerRegistered())
        self.report()
        for operation in self._operations:
            operation.joined(send)

    def received(self, body: m.Body) -> None:
        for operation in self._operations:
            if not bus_connection.has_subscriber(type(operation)):  # In-process recovery answers.
                operation.received(body)
        if isinstance(body, m.SetProfiling):
            own = profiler.of_process()
            wanted = parts_ordered(body.default_domain, body.communication, body.parts)
            own.request(wanted)
            # An order that is already in effect is answered at once.
            if int(wanted) == own.applied or not self._can_record(own):
                self.report()

    def report(self) -> None:
        """Report the states of both domains to the manager."""
        if self._send is None:
            return
        own = profiler.of_process()
        states = own.states()
        if not self._can_record(own) and own.page.wanted != NOTHING:
            log.warning("nothing is recorded: %s is not installed", self.arguments.framework)
            states = FAILED, FAILED if own.page.wanted & 1 else OFF
        self._send(m.ProfilingSet(*states))

    def _can_record(self, own: Profiler) -> bool:
        return profiler.steps_are_seen or own.library is not None


_worker: Worker | None = None
_started = False


def init(rank: int, node: int, limit_mb: int, framework: str) -> bool:
    global _worker
    arguments = WorkerArguments(rank, node, limit_mb, framework)
    try:
        own = profiler.of_process()
    except SettingsError as error:
        log.error("the worker is not initialised: %s", error)
        return False
    own.rank = rank
    own.limit(limit_mb)
    if _worker is None:
        _worker = Worker(arguments)
    elif _worker.arguments != arguments:
        moved = replace(_worker.arguments, limit_mb=limit_mb) != arguments
        if moved and _started:
            log.warning(
                "the worker keeps its rank and node: call destroy_taskd_worker before changing them"
            )
        else:
            _worker.arguments = arguments
    return True


def start() -> bool:
    global _started
    if _worker is None:
        return False
    settings, arguments = config.load(WorkerSettings), _worker.arguments
    bus = BusConfig(
        me=worker(arguments.node, arguments.rank),
        upstream=settings.proxy or PROXY,
        job=settings.job_id or config.environ.get("MINDX_TASK_ID", ""),
        token=settings.token,
    )
    if not _started:
        profiler.of_process().listen(_worker.report)
        _started = True
        _worker.accept_operations()
        _worker.watch(SwitchFile(profiler.of_process().settings.switch))
    bus_connection.subscribe(_worker, bus)
    return True


def destroy() -> bool:
    global _started
    if _worker is None:
        return False
    if _started:
        own = profiler.of_process()
        own.unlisten(_worker.report)
        own.save()
        _worker.unwatch()
        bus_connection.unsubscribe(_worker)
        _started = False
    return True
