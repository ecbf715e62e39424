"""Connects clusterd and the agents with MindIO, whose controller runs in the manager's process.

Used only where `mindio_ttp` is installed and configured (TTP_PORT): then MindIO repairs the ranks.
The actions of clusterd's signals go to MindIO's controller, and to the agents as messages with
Ascend's own codes; the controller's reports go to clusterd. The manager's machine only does the
start handshake.

Calls to the controller may be slow, so they are made in sequence in a separate thread. The
controller calls back from its own threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from taskd.ascend.mindio import PAUSE, STOP, Engine, Faults, MindioEngine, has_mindio
from taskd.ascend.recover_client import hccl_switch_nic_timeout
from taskd.model.clusterd import (
    FaultReport,
    Report,
    ResultReport,
    Signal,
    StopReport,
    StrategiesReport,
)
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import NodeRank, Position, Rank, agent
from taskd.model.manager import (
    Event,
    JobStalled,
    MessageReceived,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    RankHung,
)
from taskd.model.messages import (
    AgentHello,
    AgentRegistered,
    Body,
    ExitAgent,
    RestartAgent,
    RestartsLeft,
    RestartWorkers,
    StopWorkers,
)
from taskd.model.strategies import Strategy, WireStrategy, wire_strategy
from taskd.runtime.loop_thread import LoopThread

log = logging.getLogger(__name__)

CAUSES = {0: FaultCause.CORRUPT, 2: FaultCause.COMMUNICATION}
REMEMBERED_SIGNALS = 64
CLOSE_S = 5.0
OWN_SIGNALS = ("pauseStartAgent", "continueStartAgent")
"""Signals that the manager's own machine still handles."""

active: MindioController | None = None
"""The instance of this process, for `taskd.python.framework.manager.controller`."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("TTP_PORT") and environ.get("POD_IP")) and has_mindio()


class MindioController:
    def __init__(
        self,
        report: Callable[[Report], None],
        send: Callable[[Position, Body], None],
        joined_nodes: Callable[[], Iterable[NodeRank]],
        engine: Callable[[MindioController], Engine] = MindioEngine,
    ) -> None:
        """Must be created in the manager's event loop."""
        global active
        self._report, self._send, self._joined_nodes = report, send, joined_nodes
        self._loop = asyncio.get_running_loop()
        self._thread = LoopThread("taskd-mindio")
        self._engine = engine(self)
        self._frame = "pytorch"
        self._restarts_left = -1
        self._handled: list[object] = []
        active = self

    def start(self, frame: str = "") -> None:
        """`frame`: the job's framework; without one, that of the last start."""
        self._frame = frame or self._frame
        self._in_order(self._engine.register_callbacks)
        self._in_order(self._engine.start, self._frame)

    async def close(self) -> None:
        global active
        active = None
        last = asyncio.wrap_future(self._in_order(self._engine.destroy))
        await asyncio.wait((last,), timeout=CLOSE_S)
        self._thread.stop()

    # Signals of clusterd

    def handle(self, signal: Signal) -> None:
        key = (signal.uuid, signal.sequence or (signal.type, signal.actions, signal.strategy))
        if signal.type == "keep-alive" or key in self._handled:
            return
        if signal.uuid:  # Ascend's clusterd sends hot switches without one.
            self._handled = [*self._handled, key][-REMEMBERED_SIGNALS:]
        faults = {int(fault.rank): int(fault.kind) for fault in signal.faults}
        if signal.type == "killMaster":
            self._in_order(self._engine.destroy)
            self._send(agent(0), ExitAgent())
            return
        before, after = _for_agents(signal)
        for to, body in before:
            self._send(to, body)
        for action in signal.actions:
            self.carry_out(action, signal, faults)
        for to, body in after:
            self._in_order(self._loop.call_soon_threadsafe, self._send, to, body)
        if signal.strategy == WireStrategy.EXIT:
            self._restart_all(signal)

    def carry_out(self, action: str, signal: Signal, faults: Faults) -> None:
        engine, limit = self._engine, signal.timeout_s or None
        match action:
            case "stop_train":
                self._in_order(engine.stop_train, faults, STOP)
            case "pause_train":
                self._in_order(engine.stop_train, faults, PAUSE, limit or hccl_switch_nic_timeout())
            case "on_global_rank":
                self._in_order(engine.on_global_rank, faults, limit)
            case "change_strategy":
                params = (signal.extra,) if signal.extra else ()
                self._in_order(engine.change_strategy, signal.strategy, *params)
            case "save_and_exit":
                self._in_order(engine.save_and_exit)
            case "restart_controller":
                self._in_order(engine.destroy)
                self._in_order(engine.start, self._frame)
            case "destroy_controller":
                self._in_order(engine.destroy)
            case "hot switch" | "stop switch":
                self._in_order(engine.prepare_action, action, faults)
            case _:
                log.info("the action %r is ignored: it is not for the MindIO controller", action)

    def _restart_all(self, signal: Signal) -> None:
        """Restart all ranks on the nodes that stay, and the controller. The listed nodes exit."""
        for node in self._joined_nodes():
            if node not in signal.nodes:
                self._send(agent(node), RestartAgent(max(self._restarts_left - 1, 0)))
        self._in_order(self._engine.destroy)
        self._in_order(self._engine.start, self._frame)

    def is_for_machine(self, event: Event) -> bool:
        """Whether the manager's own machine handles the event, too."""
        match event:
            case MessageReceived(body=RestartsLeft(remaining)):
                self._restarts_left = remaining
                return True
            case MessageReceived(body=body):
                return isinstance(body, AgentRegistered | AgentHello)
            case NodeSilent() | NodeGone() | NodeDisconnected() | RankHung() | JobStalled():
                return False
            case _:
                return True

    def _in_order(self, call: Callable[..., object], *arguments: object) -> Future[None]:
        async def work() -> None:
            call(*arguments)

        done = self._thread.run(work())
        done.add_done_callback(partial(_log_failure, call))
        return done

    # Reports of the controller, from its own threads. They carry no uuid: the controller does not
    # say which order it answers, and it may be one before the last.

    def report_stop_complete(self, code: int, msg: str, fault_ranks: Faults) -> int:
        return self._pass_on(StopReport(code, "", msg, _faults(fault_ranks, msg)))

    def report_recover_strategy(self, fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
        offered = tuple(map(wire_strategy, strategy_list))
        return self._pass_on(StrategiesReport(offered, faults=_faults(fault_ranks, "")))

    def report_recover_status(self, code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
        isolated = tuple(Rank(rank) for rank in fault_ranks)
        return self._pass_on(ResultReport(code, wire_strategy(strategy), isolated, info=msg))

    def report_process_fault(
        self, fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None
    ) -> int:
        evidence = ", ".join(f"{rank}: {code}" for rank, code in (fault_codes or {}).items())
        return self._pass_on(FaultReport(_faults(fault_ranks, evidence)))

    def _pass_on(self, report: Report) -> int:
        self._loop.call_soon_threadsafe(self._report, report)
        return 0


def _for_agents(signal: Signal) -> tuple[list[tuple[Position, Body]], list[tuple[Position, Body]]]:
    """The messages to agents before the calls to the controller, and after them."""
    ranks = tuple(fault.rank for fault in signal.faults)
    nodes = [agent(node) for node in signal.nodes]
    in_place = signal.extra == Strategy.RECOVER_IN_PLACE or "fault_nodes_restart" in signal.actions
    if signal.type == "preExitProcess":
        return [(node, StopWorkers(ranks)) for node in nodes], []
    if signal.strategy == WireStrategy.DUMP:
        # Healthy ranks of these nodes may have to write, too. The order to exit comes afterwards.
        return [], []
    if in_place:
        return [], [(node, RestartWorkers(ranks)) for node in nodes]
    if signal.strategy == WireStrategy.RECOVER or "fault_nodes_exit" in signal.actions:
        return [(node, ExitAgent()) for node in nodes], []
    if signal.type == "saveAndExit" or signal.strategy == WireStrategy.EXIT:
        return [], [(node, ExitAgent()) for node in nodes]
    return [], []


def _faults(ranks: Faults, evidence: str) -> tuple[Fault, ...]:
    return tuple(
        Fault.of(Rank(rank), CAUSES.get(kind, FaultCause.EXITED), evidence)
        for rank, kind in ranks.items()
    )


def _log_failure(call: Callable[..., object], ended: Future[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        log.error("the MindIO controller's %s failed: %s", getattr(call, "__name__", call), error)
