"""The client of clusterd's Recover service for MindCluster's programs: `DLRecoverManager`.

It blocks, as its users expect: they run it in a thread. It initialises and registers the job,
subscribes to the signals, passes their actions to an engine (`ascend/mindio.py`) in sequence, and
sends the reports (`ascend/recover_calls.py`). A subscription that does not even receive keep-alives
is renewed. The documented import paths are `taskd.python.toolkit.recover_module` and
`mindx_elastic`. TaskD's manager does not use it: see `clusterd_client.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import grpc

from taskd.ascend.mindio import PAUSE, STOP, Engine, Faults, MindioEngine, engine_for
from taskd.ascend.recover_calls import RecoverCalls, reason
from taskd.ascend.recover_channel import Security
from taskd.config import environ
from taskd.errors import PeerRefused
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every, rising
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb

log = logging.getLogger("taskd.recover")

KEEP_ALIVE, KILL_MASTER = "keep-alive", "killMaster"
PAUSE_DEFAULT_S, PAUSE_LIMIT_S = 600, 7200


class Flags:
    """Two flags between a process's agent and its recover client.

    The exit flag requests a restart of the engine; the kill flag says that the job has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exit = False
        self._kill = False
        self._watchers: list[Callable[[], None]] = []

    def get_exit_flag(self) -> bool:
        with self._lock:
            return self._exit

    def set_exit_flag(self, flag: bool) -> None:
        with self._lock:
            self._exit = flag
        self._notify(flag)

    def get_kill_flag(self) -> bool:
        with self._lock:
            return self._kill

    def set_kill_flag(self, flag: bool) -> None:
        with self._lock:
            self._kill = flag
        self._notify(flag)

    @contextmanager
    def watched(self, call: Callable[[], None]) -> Iterator[None]:
        """Inside this context, call this whenever a flag is raised."""
        with self._lock:
            self._watchers.append(call)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(call)

    def _notify(self, raised: bool) -> None:
        if not raised:
            return
        with self._lock:
            watchers = list(self._watchers)
        for call in watchers:
            call()


flags = Flags()
"""The flags of this process."""


class ProtoBufData(NamedTuple):
    """The arguments of an action, from the signal that ordered it."""

    fault_ranks: Faults
    change_strategy: str
    timeout: int
    extra_params: str = ""


class RecoverClient(RecoverCalls):
    """The client of one job. `close` and the kill flag end all its threads."""

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
        # MindIO may answer an order before the last one. clusterd knows it by the missing uuid.
        self._names_orders = not isinstance(self.engine, MindioEngine)
        self.action_func_map: dict[str, Callable[..., object]] = {
            "save_and_exit": self.engine.save_and_exit,
            "stop_train": self.engine.stop_train,
            "pause_train": self.engine.stop_train,
            "on_global_rank": self.engine.on_global_rank,
            "change_strategy": self.engine.change_strategy,
            "hot switch": self.engine.prepare_action,
            "stop switch": self.engine.prepare_action,
            "new pod running": _log_new_pod,
        }
        self._flags = shared
        self._ended = threading.Event()
        self._stream: Any = None
        self._received_at = monotonic()

    def close(self) -> None:
        self._ended.set()
        super().close()
        self._end_stream()

    # The subscription

    def start_subscribe(self, frame: str = "pytorch") -> None:
        """Carry out clusterd's orders until the job ends, recovery is off, or this is closed."""
        if self._closed.is_set():
            return
        ended = self._ended = threading.Event()
        threading.Thread(target=self._connection_check, name="taskd-health", daemon=True).start()
        try:
            with self._flags.watched(self._end_stream):
                self._follow(frame, ended)
        finally:
            ended.set()

    def _follow(self, frame: str, ended: threading.Event) -> None:
        tries = Tries(rising(1.0, self._settings.backoff_limit_s), stop=ended)
        for _ in tries:
            if self._has_ended():
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
                if not self._is_interrupted():
                    log.warning("the subscription has ended: %s", reason(error))
            self.register_event.clear()
            if self._is_interrupted():
                tries.pause_next(0.0)

    def _listen(self) -> None:
        """Handle signals until the stream ends. The server may end it without an error."""
        self._received_at = monotonic()
        self._stream = self.grpc_stub.SubscribeProcessManageSignal(self.client_info)
        try:
            if self._is_interrupted():  # A flag was raised before the stream existed.
                self._end_stream()
            for signal in self._stream:
                self._received_at = monotonic()
                if self._is_interrupted():
                    self._end_stream()
                    return
                self.handle_signal(signal)
        finally:
            self._stream = None

    def _restart_engine(self, frame: str) -> None:
        self._carry_out("destroy", self.engine.destroy)
        self.start_engine(frame)
        self._flags.set_exit_flag(False)

    def _connection_check(self) -> None:
        """Detect a dead connection while no other request is made."""
        ended, has_health_check = self._ended, True
        while not ended.wait(self._settings.health_interval_s) and not self._has_ended():
            self._end_silent_stream()
            if has_health_check:
                has_health_check = self._check_health()

    def _end_silent_stream(self) -> None:
        limit = self._settings.silence_s
        if self._stream is not None and monotonic() - self._received_at > limit:
            log.warning("the subscription is renewed: clusterd has been silent for %.0f s", limit)
            self._received_at = monotonic()
            self._end_stream()

    def _check_health(self) -> bool:
        """Call HealthCheck, and join again if it fails. False: the server does not implement it."""
        try:
            self.grpc_stub.HealthCheck(self.client_info)
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("the health check failed: %s", reason(error))
            self.register_event.clear()
            if self.register_event.wait(self._settings.health_pause_s) or self._has_ended():
                return True
            # An error here also ends the subscription, which logs it.
            with suppress(grpc.RpcError, ValueError, PeerRefused):
                self.join()
        return True

    # Signals

    def handle_signal(self, signal: pb.ProcessManageSignal) -> None:
        if signal.signalType == KEEP_ALIVE:
            log.debug("received a keep-alive of clusterd")
        elif signal.jobId and signal.jobId != self.client_info.jobId:
            log.info("a signal is discarded: it is for another job, %s", signal.jobId)
        elif signal.signalType == KILL_MASTER:
            self._carry_out("destroy", self.engine.destroy)
            self._flags.set_kill_flag(True)
        elif not signal.actions:
            log.info("the signal %s has no actions", signal.signalType)
        elif self._answers.is_repeated(signal):
            self._repeat_answers(signal)
        else:
            self._carry_out_signal(signal)

    def _carry_out_signal(self, signal: pb.ProcessManageSignal) -> None:
        faults = {int(f.rank): int(f.kind) for f in codec.faults_of(signal.faultRanks)}
        data = ProtoBufData(faults, signal.changeStrategy, signal.timeout, signal.extraParams)
        actions = ", ".join(signal.actions)
        log.info("signal %s: uuid=%s actions=%s", signal.signalType, signal.uuid, actions)
        self._answers.expect(signal)
        for action in dict.fromkeys(signal.actions):
            with self.lock:
                self.do_action(action, data)

    def _repeat_answers(self, signal: pb.ProcessManageSignal) -> None:
        """The server has no answer yet: it was lost, or the order is still in progress."""
        for method, request in self._answers.sent(signal):
            log.info("signal %s is answered again: uuid=%s", signal.signalType, signal.uuid)
            self.report(method, request)

    def do_action(self, action: str, data: ProtoBufData) -> None:
        order = self.action_func_map.get(action)
        if order is None:
            log.info("the action %r is ignored: it is not for this client", action)
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
                params = [data.extra_params] if data.extra_params else []
                arguments = (data.change_strategy, *params)
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
        """ValueError if a setting is missing; other failures are logged."""
        self.engine.check(frame)
        self._carry_out("start", self.engine.start, frame)

    def wait_for_engine(self) -> bool:
        """Whether the engine has reached a training process in time. It sends no event for that, so
        this polls."""
        deadline = monotonic() + self._settings.engine_start_timeout_s
        tries = Tries(every(self._settings.retry_s), deadline=deadline, stop=self._closed)
        return any(self.engine.is_ready() for _ in tries)

    def _carry_out(self, what: str, order: Callable[..., object], *arguments: object) -> None:
        """Call the engine in a separate thread: if it hangs or raises, the subscription goes on.
        The thread prints the traceback."""
        done = threading.Event()

        def work() -> None:
            try:
                order(*arguments)
            except (grpc.RpcError, ValueError) as error:
                if not isinstance(error, grpc.RpcError) and not self._closed.is_set():
                    raise
                log.warning("the report of %s did not reach clusterd: %s", what, reason(error))
            done.set()

        thread = threading.Thread(target=work, name=f"taskd-{what}", daemon=True)
        thread.start()
        thread.join(self._settings.action_timeout_s)
        if thread.is_alive():
            limit = self._settings.action_timeout_s
            log.error("%s is not finished after %.0f s; the next order follows", what, limit)
        elif not done.is_set():
            log.error("%s has failed: see its traceback", what)

    # The end

    def _has_ended(self) -> bool:
        return self._closed.is_set() or self._flags.get_kill_flag()

    def _is_interrupted(self) -> bool:
        return self._has_ended() or self._flags.get_exit_flag()

    def _end_stream(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.cancel()


def hccl_switch_nic_timeout() -> int:
    """How many seconds a pause for a link switch may last: 2.5 times HCCL's connect timeout."""
    text = environ.get("HCCL_CONNECT_TIMEOUT", "")
    if not text.isdecimal() or int(text) == 0:
        return PAUSE_DEFAULT_S
    return min(int(int(text) * 2.5), PAUSE_LIMIT_S)


def _log_new_pod() -> None:
    log.info("the backup pod is running")
