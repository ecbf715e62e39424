"""The client of clusterd's Recover service that MindCluster's programs use: `DLRecoverManager`.

It blocks, as its users expect: they give it a thread. It initialises and registers the job,
subscribes to the signals, passes their actions on to an engine (`ascend/mindio.py`) in order, and
sends the reports (`ascend/recover_calls.py`). The subscription is given up when not even a
keep-alive comes. Under its documented names it is found in `taskd.python.toolkit.recover_module`
and in `mindx_elastic`; our own manager speaks to clusterd by its own means.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from taskd.ascend.mindio import PAUSE, STOP, Engine, Faults, engine_for
from taskd.ascend.recover_calls import RecoverCalls, reason
from taskd.ascend.recover_channel import Security
from taskd.ascend.recover_flags import Flags, flags
from taskd.config import environ
from taskd.errors import PeerRefused
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every, rising
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb

log = logging.getLogger("taskd.recover")

KEEP_ALIVE, KILL_MASTER = "keep-alive", "killMaster"
PAUSE_DEFAULT_S, PAUSE_LIMIT_S = 600, 7200


class ProtoBufData(NamedTuple):
    """What an action needs to know of the signal that ordered it."""

    fault_ranks: Faults
    change_strategy: str
    timeout: int


class RecoverClient(RecoverCalls):
    """One job's client. `close` ends all its threads; so does the kill flag."""

    def __init__(
        self,
        info: pb.ClientInfo,
        server_addr: str,
        security: Security | None = None,
        shared: Flags = flags,
    ) -> None:
        super().__init__(info, server_addr, security)
        self.lock = threading.RLock()
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
        self._flags = shared
        self._over = threading.Event()
        self._stream: Any = None
        self._heard = monotonic()

    def close(self) -> None:
        self._over.set()
        super().close()
        self._end_stream()

    # Listening

    def start_subscribe(self, frame: str = "pytorch") -> None:
        """Follow clusterd's orders until the job is ended, recovery is off, or we are closed."""
        if self._closed.is_set():
            return
        over = self._over = threading.Event()
        threading.Thread(target=self._connection_check, name="taskd-health", daemon=True).start()
        try:
            with self._flags.watched(self._end_stream):
                self._follow(frame, over)
        finally:
            over.set()

    def _follow(self, frame: str, over: threading.Event) -> None:
        tries = Tries(rising(1.0, self._settings.backoff_limit_s), stop=over)
        for _ in tries:
            if self._is_over():
                return
            if self._flags.get_exit_flag():
                self._restart_engine(frame)
            try:
                if self.join():
                    tries.reset()
                    self._listen()
            except PeerRefused:
                return
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed.
                if not self._is_wanted_elsewhere():
                    log.warning("the subscription has ended: %s", reason(error))
            self.register_event.clear()
            if self._is_wanted_elsewhere():
                tries.pause_next(0.0)

    def _listen(self) -> None:
        """Until the server ends the stream, which need not be an error."""
        self._heard = monotonic()
        self._stream = self.grpc_stub.SubscribeProcessManageSignal(self.client_info)
        try:
            if self._is_wanted_elsewhere():  # Since before there was a stream to be ended.
                self._end_stream()
            for signal in self._stream:
                self._heard = monotonic()
                if self._is_wanted_elsewhere():
                    self._end_stream()
                    return
                self.take_signal(signal)
        finally:
            self._stream = None

    def _restart_engine(self, frame: str) -> None:
        self._carry_out("destroy", self.engine.destroy)
        self.start_engine(frame)
        self._flags.set_exit_flag(False)

    def _connection_check(self) -> None:
        """Notice a dead connection that no request of ours would notice."""
        over, has_health_check = self._over, True
        while not over.wait(self._settings.health_interval_s) and not self._is_over():
            self._end_silent_stream()
            if has_health_check:
                has_health_check = self._checked()

    def _end_silent_stream(self) -> None:
        limit = self._settings.silence_s
        if self._stream is not None and monotonic() - self._heard > limit:
            log.warning("clusterd has been silent for %.0f s: subscribing anew", limit)
            self._heard = monotonic()
            self._end_stream()

    def _checked(self) -> bool:
        """Ask for a sign of life, join again without one. False: the server cannot be asked."""
        try:
            self.grpc_stub.HealthCheck(self.client_info)
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("the health check failed: %s", reason(error))
            self.register_event.clear()
            if self.register_event.wait(self._settings.health_pause_s) or self._is_over():
                return True
            # What goes wrong now goes wrong for the subscription, too, which tells it.
            with suppress(grpc.RpcError, ValueError, PeerRefused):
                self.join()
        return True

    # Obeying

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
        faults = {int(f.rank): int(f.kind) for f in codec.faults_of(signal.faultRanks)}
        data = ProtoBufData(faults, signal.changeStrategy, signal.timeout)
        log.info("%s (%s): %s", signal.signalType, signal.uuid, ", ".join(signal.actions))
        self._answers.expect(signal)
        for action in dict.fromkeys(signal.actions):
            with self.lock:
                self.do_action(action, data)

    def _answer_again(self, signal: pb.ProcessManageSignal) -> None:
        """The server repeats what it has no answer to: either ours was lost, or we are at it."""
        for method, request in self._answers.given(signal):
            log.info("%s (%s) is answered again", signal.signalType, signal.uuid)
            self.report(method, request)

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

    # The engine

    def start_engine(self, frame: str) -> None:
        """Raises ValueError if a setting is missing; what else goes wrong is logged."""
        self.engine.check(frame)
        self._carry_out("start", self.engine.start, frame)

    def wait_for_engine(self) -> bool:
        """Whether the engine has reached a training process in time. It offers nothing to wait
        for, so it is asked again and again."""
        deadline = monotonic() + self._settings.engine_start_timeout_s
        tries = Tries(every(self._settings.retry_s), deadline=deadline, stop=self._closed)
        return any(self.engine.is_ready() for _ in tries)

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
                log.warning("%s: clusterd could not be told: %s", what, reason(error))
            done.set()

        thread = threading.Thread(target=work, name=f"taskd-{what}", daemon=True)
        thread.start()
        thread.join(self._settings.action_timeout_s)
        if thread.is_alive():
            limit = self._settings.action_timeout_s
            log.error("%s is still not done after %.0f s; going on", what, limit)
        elif not done.is_set():
            log.error("%s has failed", what)

    # Ending

    def _is_over(self) -> bool:
        return self._closed.is_set() or self._flags.get_kill_flag()

    def _is_wanted_elsewhere(self) -> bool:
        return self._is_over() or self._flags.get_exit_flag()

    def _end_stream(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.cancel()


def hccl_switch_nic_timeout() -> int:
    """How long a pause for a link switch may last: 2.5 times the time that HCCL may connect."""
    text = environ.get("HCCL_CONNECT_TIMEOUT", "")
    if not text.isdecimal() or int(text) == 0:
        return PAUSE_DEFAULT_S
    return min(int(int(text) * 2.5), PAUSE_LIMIT_S)


def _told() -> None:
    log.info("the backup pod is running")
