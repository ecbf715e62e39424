"""The client of clusterd's Recover service that MindCluster's programs use: `DLRecoverManager`.

It blocks, as its users expect: they give it a thread. It initialises and registers the job,
subscribes to the signals, passes their actions on to an engine (`edge/engine.py`) in order, and
sends the reports. Every call has a deadline; the subscription is given up when not even a
keep-alive comes. Under its documented names it is found in `taskd.python.toolkit.recover_module`
and in `mindx_elastic`; our own manager speaks to clusterd by its own means.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from taskd.config import environ
from taskd.edge.clock import monotonic
from taskd.edge.engine import PAUSE, STOP, Engine, Faults, engine_for
from taskd.edge.recover_answers import Answers
from taskd.edge.recover_channel import RecoverClientSettings, Security, open_channel, settings
from taskd.edge.recover_flags import Flags, flags
from taskd.model.codes import RecoverCode
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

log = logging.getLogger("taskd.recover")

KEEP_ALIVE, KILL_MASTER = "keep-alive", "killMaster"
PAUSE_DEFAULT_S, PAUSE_LIMIT_S = 600, 7200


class ProtoBufData(NamedTuple):
    """What an action needs to know of the signal that ordered it."""

    fault_ranks: Faults
    change_strategy: str
    timeout: int


class RecoverClient:
    """One job's client. `close` ends all its threads; so does the kill flag."""

    def __init__(
        self,
        info: pb.ClientInfo,
        server_addr: str,
        security: Security | None = None,
        own: RecoverClientSettings | None = None,
        shared: Flags = flags,
    ) -> None:
        self.client_info = info
        self.server_addr = server_addr
        self.lock = threading.RLock()
        self.register_event = threading.Event()
        self.engine: Engine = engine_for(self)
        self.action_func_map: dict[str, Callable[..., object]] = {
            "save_and_exit": self.engine.save_and_exit,
            "stop_train": self.engine.stop_train,
            "pause_train": self.engine.stop_train,
            "on_global_rank": self.engine.on_global_rank,
            "change_strategy": self.engine.change_strategy,
            "hot switch": self.engine.prepare_action,
            "stop switch": self.engine.prepare_action,
            "new pod running": _told,
        }
        self._settings = own or settings()
        self._security = security
        self._flags = shared
        self._answers = Answers()
        self._closed = threading.Event()
        self._joining = threading.Lock()
        self._stream: Any = None
        self._heard = monotonic()
        self.grpc_channel: Any = None
        self.grpc_stub: Any = None
        self._init_client()

    def _init_client(self) -> None:
        before = self.grpc_channel
        self.grpc_channel = open_channel(self.server_addr, self._settings, self._security)
        self.grpc_stub = RecoverStub(self.grpc_channel)  # type: ignore[no-untyped-call]
        if before is not None:
            before.close()

    def close(self) -> None:
        self._closed.set()
        self._end_stream()
        self.grpc_channel.close()

    # Joining

    def register(self, request: pb.ClientInfo) -> pb.Status:
        status: pb.Status = self.grpc_stub.Register(request)
        return status

    def init_clusterd(self) -> bool:
        """Try until clusterd has taken the job up. False: recovery is off, or we were closed."""
        while not self._closed.is_set():
            try:
                status = self.grpc_stub.Init(self.client_info)
            except (grpc.RpcError, ValueError) as error:
                log.warning("clusterd at %s is not reached: %s", self.server_addr, _reason(error))
                if not self._pause(self._settings.retry_s):
                    self._init_client()
                continue
            if status.code == RecoverCode.OK:
                log.info("clusterd has initialised job %s", self.client_info.jobId)
                return True
            if status.code == RecoverCode.ProcessRecoverEnableOff:
                log.warning("job %s has no recovery: %s", self.client_info.jobId, status.info)
                return False
            log.warning("Init was answered with %d: %s", status.code, status.info)
            self._pause(self._settings.retry_s)
        return False

    def _join(self) -> bool:
        """Init and Register; True once registered. Two threads may want this at a time."""
        with self._joining:
            if not self.init_clusterd():
                self.close()
                return False
            status = self.register(self.client_info)
            if status.code == RecoverCode.OK:
                self.register_event.set()
                return True
            log.warning("Register was answered with %d: %s", status.code, status.info)
            return False

    def register_some_times(self, attempts: int) -> bool:
        for _ in range(attempts):
            try:
                status = self.register(self.client_info)
            except grpc.RpcError as error:
                log.warning("Register failed: %s", _reason(error))
            else:
                if status.code == RecoverCode.OK:
                    return True
                log.warning("Register was answered with %d: %s", status.code, status.info)
            if self._pause(self._settings.retry_s):
                return False
        return False

    def start_engine(self, frame: str) -> None:
        """Raises ValueError if a setting is missing; what else goes wrong is logged."""
        self.engine.check(frame)
        self._carry_out("start", self.engine.start, frame)

    def wait_for_engine(self) -> bool:
        """Whether the engine has reached a training process in time. It offers nothing to wait
        for, so it is asked again and again."""
        deadline = monotonic() + self._settings.engine_start_timeout_s
        while not self.engine.is_ready():
            if monotonic() >= deadline or self._pause(self._settings.retry_s):
                return False
        return True

    # Listening

    def start_subscribe(self, frame: str = "pytorch") -> None:
        """Follow clusterd's orders until the job is ended, recovery is off, or we are closed."""
        threading.Thread(target=self._connection_check, name="taskd-health", daemon=True).start()
        attempt = 1
        with self._flags.watched(self._end_stream):
            while not self._is_over():
                if self._flags.get_exit_flag():
                    self._restart_engine(frame)
                try:
                    if self._join():
                        attempt = 1
                        self._listen()
                except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed.
                    if not self._is_wanted_elsewhere():
                        log.warning("the subscription has ended: %s", _reason(error))
                self.register_event.clear()
                if not self._is_wanted_elsewhere():
                    self._pause(min(self._settings.backoff_limit_s, attempt))
                    attempt += 1
        self.close()

    def _listen(self) -> None:
        self._heard = monotonic()
        self._stream = self.grpc_stub.SubscribeProcessManageSignal(self.client_info)
        if self._is_wanted_elsewhere():  # Since before there was a stream that could be ended.
            self._end_stream()
        for signal in self._stream:
            self._heard = monotonic()
            if self._is_wanted_elsewhere():
                self._end_stream()
                return
            self.take_signal(signal)
        # The server has ended the stream without an error: the caller subscribes again.

    def _restart_engine(self, frame: str) -> None:
        self._carry_out("destroy", self.engine.destroy)
        self.start_engine(frame)
        self._flags.set_exit_flag(False)

    def _connection_check(self) -> None:
        """Notice a dead connection that no request of ours would notice."""
        pause_s = self._settings.health_interval_s
        while not self._pause(pause_s) and not self._is_over():
            if monotonic() - self._heard > self._settings.silence_s:
                log.warning("clusterd has been silent for %.0f s", self._settings.silence_s)
                self._heard = monotonic()
                self._end_stream()
            try:
                self.grpc_stub.HealthCheck(self.client_info)
            except (grpc.RpcError, ValueError) as error:
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                self._reconnect(error)

    def _reconnect(self, error: Exception) -> None:
        log.warning("the health check failed: %s", _reason(error))
        self.register_event.clear()
        if self.register_event.wait(self._settings.health_pause_s) or self._is_over():
            return
        with suppress(grpc.RpcError, ValueError):  # The next health check tells it again.
            self._join()

    def take_signal(self, signal: pb.ProcessManageSignal) -> None:
        if signal.signalType == KEEP_ALIVE:
            log.debug("clusterd is alive")
        elif signal.jobId and signal.jobId != self.client_info.jobId:
            log.info("a signal for job %s is not for us: it is discarded", signal.jobId)
        elif signal.signalType == KILL_MASTER:
            self._carry_out("destroy", self.engine.destroy)
            self._flags.set_kill_flag(True)
        elif not signal.actions:
            log.info("the signal %s orders nothing", signal.signalType)
        elif self._answers.is_repeated(signal):
            self._answer_again(signal)
        else:
            self._obey(signal)

    def _obey(self, signal: pb.ProcessManageSignal) -> None:
        data = ProtoBufData(_faults(signal.faultRanks), signal.changeStrategy, signal.timeout)
        log.info("%s (%s): %s", signal.signalType, signal.uuid, ", ".join(signal.actions))
        self._answers.expect(signal)
        for action in dict.fromkeys(signal.actions):
            with self.lock:
                self.do_action(action, data)

    def _answer_again(self, signal: pb.ProcessManageSignal) -> None:
        """The server repeats what it has no answer to: either ours was lost, or we are at it."""
        for method, request in self._answers.given(signal):
            log.info("%s (%s) is answered again", signal.signalType, signal.uuid)
            self._report(method, request)

    def do_action(self, action: str, data: ProtoBufData) -> None:
        order = self.action_func_map.get(action)
        if order is None:
            log.info("the action %r is not for this client", action)
            return
        match action:
            case "stop_train":
                arguments: tuple[object, ...] = (data.fault_ranks, STOP)
            case "pause_train":
                limit = data.timeout or self._get_hccl_switch_nic_timeout()
                arguments = (data.fault_ranks, PAUSE, limit)
            case "on_global_rank":
                arguments = (data.fault_ranks, *([data.timeout] if data.timeout else []))
            case "change_strategy":
                arguments = (data.change_strategy,)
            case "hot switch" | "stop switch":
                arguments = (action, data.fault_ranks)
            case _:
                arguments = ()
        self._carry_out(action, order, *arguments)

    @staticmethod
    def _get_hccl_switch_nic_timeout() -> int:
        return hccl_switch_nic_timeout()

    def _carry_out(self, what: str, order: Callable[..., object], *arguments: object) -> None:
        """In a thread of its own: an engine that hangs or raises must not end the subscription.
        Its traceback is printed by the thread."""
        done = threading.Event()

        def work() -> None:
            try:
                order(*arguments)
            except (grpc.RpcError, ValueError) as error:
                if not isinstance(error, grpc.RpcError) and not self._closed.is_set():
                    raise
                log.warning("%s: clusterd could not be told: %s", what, _reason(error))
            done.set()

        thread = threading.Thread(target=work, name=f"taskd-{what}", daemon=True)
        thread.start()
        thread.join(self._settings.action_timeout_s)
        if thread.is_alive():
            limit = self._settings.action_timeout_s
            log.error("%s is still not done after %.0f s; going on", what, limit)
        elif not done.is_set():
            log.error("%s has failed", what)

    # Reporting

    def report_stop_complete(self, code: int, msg: str, fault_ranks: Faults) -> int:
        status = pb.Status(code=code, info=msg)
        request = pb.StopCompleteRequest(
            jobId=self.client_info.jobId, status=status, faultRanks=_ranks(fault_ranks)
        )
        return self._answer("ReportStopComplete", request)

    def report_recover_strategy(self, fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
        request = pb.RecoverStrategyRequest(
            jobId=self.client_info.jobId, faultRanks=_ranks(fault_ranks), strategies=strategy_list
        )
        return self._answer("ReportRecoverStrategy", request)

    def report_recover_status(self, code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
        request = pb.RecoverStatusRequest(
            jobId=self.client_info.jobId,
            status=pb.Status(code=code, info=msg),
            strategy=strategy,
            isolateRankIds=[str(rank) for rank in fault_ranks],
        )
        return self._answer("ReportRecoverStatus", request)

    def report_process_fault(
        self, fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None
    ) -> int:
        codes = fault_codes or {}
        request = pb.ProcessFaultRequest(
            jobId=self.client_info.jobId,
            faultRanks=_ranks(fault_ranks),
            evidence=[str(codes.get(rank, "")) for rank in fault_ranks] if codes else [],
        )
        return self._report("ReportProcessFault", request)

    def _answer(self, method: str, request: Any) -> int:
        request.uuid = self._answers.uuid_for(method)
        self._answers.remember(method, request)
        return self._report(method, request)

    def _report(self, method: str, request: Any) -> int:
        status = getattr(self.grpc_stub, method)(request)
        if status.code == RecoverCode.OK:
            return int(RecoverCode.OK)
        log.warning("%s was answered with %d: %s", method, status.code, status.info)
        self.register(self.client_info)
        return int(getattr(self.grpc_stub, method)(request).code)

    # Ending

    def _is_over(self) -> bool:
        return self._closed.is_set() or self._flags.get_kill_flag()

    def _is_wanted_elsewhere(self) -> bool:
        return self._is_over() or self._flags.get_exit_flag()

    def _pause(self, seconds: float) -> bool:
        """Wait, unless we are closed: then True at once."""
        return self._closed.wait(seconds)

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


def hccl_switch_nic_timeout() -> int:
    """How long a pause for a link switch may last: 2.5 times the time that HCCL may connect."""
    text = environ.get("HCCL_CONNECT_TIMEOUT", "")
    if not text.isdecimal() or int(text) == 0:
        return PAUSE_DEFAULT_S
    return min(int(int(text) * 2.5), PAUSE_LIMIT_S)


def _told() -> None:
    log.info("the backup pod is running")


def _faults(ranks: Iterable[pb.FaultRank]) -> dict[int, int]:
    faults = {}
    for fault in ranks:
        try:
            faults[int(fault.rankId)] = int(fault.faultType)
        except ValueError:
            log.warning("%r with type %r is no fault: ignored", fault.rankId, fault.faultType)
    return faults


def _ranks(faults: Faults) -> list[pb.FaultRank]:
    return [pb.FaultRank(rankId=str(rank), faultType=str(kind)) for rank, kind in faults.items()]


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
