"""The manager process of one job: the bus to all nodes, the connection to clusterd, the machine.

`serve` blocks until the job has ended and returns its exit code; `python -m taskd.manager`, the
launcher and `start_taskd_manager()` all call it. The manager needs no state on disk: after a crash
its next incarnation rebuilds its view from agents, workers and clusterd.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from taskd.ascend.mindio_controller import OWN_SIGNALS, MindioController, is_wanted
from taskd.bus.endpoint import Bus, BusConfig
from taskd.config import environ
from taskd.core.manager import machine
from taskd.core.manager.states import Ended, Outcome, Repairing, Resuming, State
from taskd.manager.act import Act
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.operation_orders import Operations, Precheck
from taskd.manager.plugins import Plugins, snapshot_of
from taskd.manager.reports import job_status as status
from taskd.manager.reports.incident_lines import IncidentLines
from taskd.manager.reports.incident_reports import IncidentReports
from taskd.manager.reports.incident_spans import SpanExport
from taskd.manager.reports.job_metrics import JobMetrics
from taskd.manager.sense import Sense
from taskd.manager.settings import EMBEDDED, ManagerConfig
from taskd.model.clusterd import Signal
from taskd.model.ids import NodeRank, Rank, manager
from taskd.model.manager import Command, Event, MessageReceived, SignalReceived, Subscribed
from taskd.runtime import metrics
from taskd.runtime.clock import monotonic, wall
from taskd.runtime.driver import Driver, Transition
from taskd.runtime.retry import Tries, every

if TYPE_CHECKING:
    from taskd.manager.job_term import JobTerm

log = logging.getLogger(__name__)

HISTORY_S = 1.0
"""How often clusterd is asked for the incidents of former managers until it answers."""
NOT_LEADING = 3
"""The exit code of a manager whose term has ended: its supervisor starts the next candidate."""


def serve(config: ManagerConfig) -> int:
    """Raises SettingsError when it cannot listen; otherwise returns the job's exit code."""
    return asyncio.run(run(config))


async def run(config: ManagerConfig) -> int:
    async with AsyncExitStack() as stack:
        if config.clusterd == EMBEDDED:
            from taskd.manager.clusterd_link.embedded_clusterd import clusterd as embedded
        term = None
        if config.etcd:
            from taskd.manager.job_term import lead

            term = await lead(config, stack)
        bus = Bus(
            BusConfig(
                me=manager(),
                listen=config.listen,
                job=config.job_id,
                token=config.token,
                token_file=config.token_file,
                tls=config.tls,
                epoch=term.epoch if term else 0,
                run=term.lease.run if term else "",
            )
        )
        await bus.start()
        stack.push_async_callback(bus.close)
        if config.clusterd == EMBEDDED:
            journal = term.journal if term else None
            config = await stack.enter_async_context(embedded(config, journal))
        address = config.clusterd
        clusterd = ClusterdClient(address, config) if address else None
        if clusterd is not None:
            stack.push_async_callback(clusterd.close)
            clusterd.declaration = status.declaration(config)
        status.write_ready(config, bus.port, address)
        log.info("job %s: listening: port=%d clusterd=%s", config.job_id, bus.port, address)
        return await Manager(config, bus, clusterd, term).run()


class Manager:
    def __init__(
        self,
        config: ManagerConfig,
        bus: Bus,
        clusterd: ClusterdClient | None,
        term: JobTerm | None = None,
    ) -> None:
        """`term`: this manager is one of several candidates, and leads now."""
        self._config, self._clusterd, self._term = config, clusterd, term
        self._summary = status.SummaryFile(config, term.earlier if term else None)
        self._sense = Sense(bus, config)
        self._act = Act(bus, clusterd, self._sense.inbox.put_nowait, self._leads)
        self._plugins = self._find_plugins()
        self._operations = (
            None
            if clusterd is None
            else Operations(
                self._act.send,
                clusterd,
                self._places,
                config.operations,
                self._sense.inbox.put_nowait,
            )
        )
        self._sense.operations = self._operations
        if clusterd is not None and self._operations is not None and config.precheck:
            look = lambda: self.state.job  # noqa: E731
            self._operations.precheck = Precheck(clusterd, look, self._sense.progress)
        self._with_mindio = clusterd is not None and is_wanted(environ)
        self._driver: Driver[State, Event, Command] = Driver(
            machine.begin(config.job, monotonic(), self._with_mindio),
            self._step,
            self._act.perform,
            inbox=self._sense.inbox,
            log=log,
            subject=lambda state: f"incident={state.job.incident}",
            before=self._state_set,
            after=self._commands_done,
        )
        self.because = ""
        self._changed = asyncio.Event()
        self._spans = SpanExport(config.otlp, config.job_id) if config.otlp else None
        self._incidents = IncidentReports(
            config.job_id,
            wall() - monotonic(),
            self._sense.evidence.changes,
            (lambda report: None) if self._spans is None else self._spans.send,
        )
        self._incident_lines = IncidentLines() if config.show_incidents else None
        self._pace = status.Pace(monotonic(), wall())
        self._mindio: MindioController | None = None

    @property
    def state(self) -> State:
        return self._driver.state

    async def run(self) -> int:
        """Run until the job has ended, or until a signal comes: the job continues in that case."""
        if self._clusterd is not None and self._with_mindio:
            self._mindio = MindioController(self._clusterd.report, self._act.send, self._nodes)
            self._mindio.start("mindspore" if self._config.job.mindspore else "pytorch")
        tasks = [asyncio.create_task(work) for work in self._tasks()]
        driving = asyncio.create_task(self._driver.run_until(Ended))
        stop = _stop_signal()
        try:
            await asyncio.wait({driving, stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if not driving.done():
                if self._term is not None and self._term.leadership.lost.is_set():
                    return NOT_LEADING
                log.info("received a signal to stop; the job continues without a manager")
                return 0
            ended = driving.result()
            await self._report_end(ended)
            return ended.exit_code
        finally:
            for task in (*tasks, driving, stop):
                task.cancel()
            await asyncio.gather(*tasks, driving, stop, return_exceptions=True)
            if self._mindio is not None:
                await self._mindio.close()
            if self._plugins is not None:
                await self._plugins.close()

    def _tasks(self) -> list[Any]:
        profiling = self._sense.profiling
        work: list[Any] = []
        if self._term is not None:
            # First: before any message, a new leader must know which nodes it has to hear.
            work += [
                self._term.find_lost_nodes(self._sense.inbox.put_nowait),
                self._term.leadership.lost.wait(),
            ]
        work += [self._sense.receive(), self._sense.watch_connections(), profiling.run()]
        if self._plugins is not None:
            work.append(self._run_plugins(self._plugins))
        if self._clusterd is not None:
            inbox = self._sense.inbox

            def take(signal_: Signal) -> None:
                if self._mindio is not None and signal_.type not in OWN_SIGNALS:
                    self._mindio.handle(signal_)
                else:
                    inbox.put_nowait(SignalReceived(signal_))

            work += [
                self._clusterd.listen(take, lambda: inbox.put_nowait(Subscribed())),
                self._clusterd.deliver(),
                self._learn_past_rounds(self._clusterd),
                self._clusterd.follow_switch(profiling.set_parts),
                status.publish(
                    self._clusterd,
                    self._config,
                    self._snapshot,
                    self._changed,
                    self._incidents,
                    self._pace,
                ),
            ]
            if self._operations is not None:
                work += self._operations.tasks()
        if self._config.metrics:
            work.append(self._serve_metrics())
        return work

    async def _learn_past_rounds(self, clusterd: ClusterdClient) -> None:
        """Those of former managers, before clusterd forgets them."""
        async for _ in Tries(every(HISTORY_S)):
            if await self._take_past_rounds(clusterd):
                break
        await asyncio.Event().wait()

    async def _take_past_rounds(self, clusterd: ClusterdClient) -> bool:
        if (rounds := await clusterd.past_rounds()) is not None:
            self._summary.complete(rounds, self.state)
        return rounds is not None

    async def _serve_metrics(self) -> None:
        job_metrics = JobMetrics(self._config, self._snapshot)
        self._sense.on_heartbeat = job_metrics.update
        async with metrics.serve(self._config.metrics, job_metrics.metrics):
            await asyncio.Event().wait()

    async def _run_plugins(self, plugins: Plugins) -> None:
        await plugins.run()
        await asyncio.Event().wait()  # if all plugins are disabled, the manager continues

    def _find_plugins(self) -> Plugins | None:
        directory = self._config.plugin_dir
        if directory is None:
            return None
        if not directory.is_dir():
            log.warning("plugin_dir %s is not a directory: no plugins are loaded", directory)
            return None

        def node_of(rank: int) -> int | None:
            view = self.state.job.view.ranks.get(Rank(rank))
            return None if view is None else view.node

        return Plugins(directory, self._act.send, node_of)

    def _leads(self) -> bool:
        """False: this manager must not act any more; `run` ends."""
        return self._term is None or self._term.leads

    def _nodes(self) -> list[NodeRank]:
        return [node for node, view in self.state.job.view.nodes.items() if view.present]

    def _places(self) -> dict[Rank, NodeRank]:
        """The ranks that take part in training, and their nodes."""
        job = self.state.job
        return {rank: job.view.ranks[rank].node for rank in job.running()}

    def _snapshot(self) -> status.JobSnapshot:
        operation = "" if self._operations is None else self._operations.describe()
        progress, profiling = self._sense.progress, self._sense.profiling
        copies = self._sense.evidence.copies
        return status.JobSnapshot(self.state, self.because, progress, profiling, operation, copies)

    def _step(self, state: State, event: Event, now: float) -> Outcome | None:
        if isinstance(event, MessageReceived):
            self._sense.message_handled()
        if not self._leads():
            return None
        if self._mindio is not None and not self._mindio.is_for_machine(event):
            return None
        return machine.step(state, event, now, self._config.job)

    def _state_set(self, transition: Transition[State, Event, Command]) -> None:
        if transition.state_changed:
            self.because = transition.outcome.because
            self._changed.set()
            self._sense.profiling.stragglers.job_disturbed()
            state = transition.outcome.state
            if isinstance(state, Repairing | Resuming) and type(state) is not type(
                transition.before
            ):
                self._sense.repair_begins()

    def _commands_done(self, transition: Transition[State, Event, Command]) -> None:
        before, state = transition.before, transition.outcome.state
        over = self._incidents.observe(before.job, state.job, self._sense.progress)
        if self._incident_lines is not None:
            for record in over:
                self._incident_lines.show(status.summary_of(record))
        if self._operations is not None:
            self._operations.job_changed(state)
        if self._plugins is not None and state is not before:
            self._plugins.show(snapshot_of(self._config.job_id, state, self.because))
        if state.job.past_incidents != before.job.past_incidents:
            self._changed.set()
            self._summary.write(state)
            if self._term is not None:
                self._term.incidents.keep(self._summary.incidents(state))

    async def _report_end(self, ended: Ended) -> None:
        if self._clusterd is not None:
            await self._take_past_rounds(self._clusterd)
        self._summary.write(ended)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.flush)
        if self._term is not None:
            await self._term.end_job(self._summary.incidents(ended))
        if self._clusterd is not None:
            await status.send_incidents(self._clusterd, self._incidents)
            progress = status.progress_of(self._config, self._snapshot())
            self._pace.update(progress, monotonic())
            await self._clusterd.publish(progress)
            await self._clusterd.end_job(ended.exit_code, ended.because)


def _stop_signal() -> asyncio.Task[bool]:
    """Wait for SIGTERM or SIGINT. Outside the main thread signals cannot be handled."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(signum, stop.set)
        except (ValueError, RuntimeError):
            log.debug("not in the main thread: %s is not handled", signum.name)
    return asyncio.create_task(stop.wait())
