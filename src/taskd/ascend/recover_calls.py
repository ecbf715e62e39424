"""The single calls of a recover client: join the job and send reports, with retries.

`ascend/recover_client.py` adds the subscription. Every call has a deadline, which the channel sets
(`ascend/recover_channel.py`). Errors of gRPC are passed to the caller, as documented.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from taskd.ascend.mindio import Faults
from taskd.ascend.recover_channel import RecoverClientSettings, Security, open_channel, settings
from taskd.errors import PeerRefused
from taskd.model.clusterd import (
    ExpectedReport,
    FaultReport,
    ResultReport,
    StopReport,
    StrategiesReport,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank
from taskd.runtime.retry import Tries, every
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

log = logging.getLogger("taskd.recover")

NO_CODES: Mapping[int, str] = {}
ANSWERED_BY = {
    "stop_train": "ReportStopComplete",
    "pause_train": "ReportStopComplete",
    "on_global_rank": "ReportRecoverStrategy",
    "change_strategy": "ReportRecoverStatus",
    "save_and_exit": "ReportRecoverStatus",
}
REMEMBERED = 256
"""How many signals are remembered, to recognise repeated ones."""


class RecoverCalls:
    _names_orders = True
    """Reports carry the uuid of the order that they answer, as far as it is known."""

    def __init__(self, info: pb.ClientInfo, server_addr: str, security: Security | None) -> None:
        self.client_info = info
        self.server_addr = server_addr
        self.register_event = threading.Event()
        self._settings: RecoverClientSettings = settings()
        self._security = security
        self._answers = Answers()
        self._closed = threading.Event()
        self._joining = threading.Lock()
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
        self.grpc_channel.close()

    # Joining

    def register(self, request: pb.ClientInfo) -> pb.Status:
        status: pb.Status = self.grpc_stub.Register(request)
        return status

    def init_clusterd(self) -> bool:
        """Call Init until clusterd accepts the job. False: recovery is off, or this was closed."""
        is_broken = False
        for _ in Tries(every(self._settings.retry_s), stop=self._closed):
            try:
                if is_broken:
                    self._init_client()  # with certificates that were renewed in the meantime
                status = self.grpc_stub.Init(self.client_info)
            except (grpc.RpcError, ValueError) as error:
                # ValueError: the channel is closed, or a new certificate is half written.
                log.warning("clusterd at %s cannot be reached: %s", self.server_addr, reason(error))
                is_broken = True
                continue
            is_broken = False
            if status.code == RecoverCode.OK:
                log.info("clusterd has initialised job %s", self.client_info.jobId)
                return True
            if status.code == RecoverCode.ProcessRecoverEnableOff:
                log.warning("recovery is off for job %s: %s", self.client_info.jobId, status.info)
                return False
            log.warning("Init was refused: code=%d %s", status.code, status.info)
        return False

    def join(self) -> bool:
        """Call Init and Register; True if registered. PeerRefused: recovery is off permanently.

        Two threads may call this at the same time.
        """
        with self._joining:
            if not self.init_clusterd():
                raise PeerRefused(f"recovery is off for job {self.client_info.jobId}")
            return self._register_once()

    def register_some_times(self, attempts: int) -> bool:
        for _ in Tries(every(self._settings.retry_s), at_most=attempts, stop=self._closed):
            try:
                if self._register_once():
                    return True
            except grpc.RpcError as error:
                log.warning("Register failed: %s", reason(error))
        return False

    def _register_once(self) -> bool:
        status = self.register(self.client_info)
        if status.code == RecoverCode.OK:
            self.register_event.set()
            return True
        log.warning("Register was refused: code=%d %s", status.code, status.info)
        return False

    # Reporting

    def report_stop_complete(self, code: int, msg: str, fault_ranks: Faults) -> int:
        return self._answer(StopReport(code, info=msg, faults=_faults(fault_ranks)))

    def report_recover_strategy(self, fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
        return self._answer(StrategiesReport(tuple(strategy_list), faults=_faults(fault_ranks)))

    def report_recover_status(self, code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
        isolated = tuple(Rank(rank) for rank in fault_ranks)
        return self._answer(ResultReport(code, strategy, isolated, info=msg))

    def report_process_fault(
        self, fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None
    ) -> int:
        report = FaultReport(_faults(fault_ranks, fault_codes or {}))
        return self.report(*codec.report_request(self.client_info.jobId, report))

    def _answer(self, report: ExpectedReport) -> int:
        method, request = codec.report_request(self.client_info.jobId, report)
        uuid = self._answers.uuid_for(method)
        if self._names_orders:
            request.uuid = uuid
        self._answers.remember(method, uuid, request)
        return self.report(method, request)

    def report(self, method: str, request: Any) -> int:
        """Send the report and return clusterd's code. If it is refused, register and send it again:
        the server may have lost the registration."""
        status = getattr(self.grpc_stub, method)(request)
        if status.code == RecoverCode.OK:
            return int(RecoverCode.OK)
        log.warning("%s was refused: code=%d %s", method, status.code, status.info)
        self.register(self.client_info)
        return int(getattr(self.grpc_stub, method)(request).code)


def _faults(faults: Faults, codes: Mapping[int, str] = NO_CODES) -> tuple[Fault, ...]:
    return tuple(
        Fault(Rank(rank), FaultKind.parse(str(kind)), str(codes.get(rank, "")))
        for rank, kind in faults.items()
    )


def reason(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)


class Answers:
    """Which signal a report answers, and the answers already sent.

    clusterd gives every signal a uuid and repeats a signal without an answer after either side has
    lost the connection. An order must be carried out once, but its answer may be sent twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int], None] = {}
        self._expected: dict[str, str] = {}
        self._sent: dict[tuple[str, str], Any] = {}

    def is_repeated(self, signal: pb.ProcessManageSignal) -> bool:
        """Only servers that number their signals repeat them; Ascend's server does not."""
        with self._lock:
            return bool(signal.sequence) and (signal.uuid, signal.sequence) in self._seen

    def expect(self, signal: pb.ProcessManageSignal) -> None:
        """From now on, reports of the kinds that this signal requests carry its uuid."""
        with self._lock:
            _remember(self._seen, (signal.uuid, signal.sequence), None)
            for method in _methods(signal):
                self._expected[method] = signal.uuid
                self._sent.pop((method, signal.uuid), None)

    def uuid_for(self, method: str) -> str:
        with self._lock:
            return self._expected.get(method, "")

    def remember(self, method: str, uuid: str, request: Any) -> None:
        with self._lock:
            _remember(self._sent, (method, uuid), request)

    def sent(self, signal: pb.ProcessManageSignal) -> list[tuple[str, Any]]:
        with self._lock:
            answers = ((name, self._sent.get((name, signal.uuid))) for name in _methods(signal))
            return [(name, answer) for name, answer in answers if answer is not None]


def _methods(signal: pb.ProcessManageSignal) -> list[str]:
    named = (ANSWERED_BY.get(action) for action in signal.actions)
    return list(dict.fromkeys(name for name in named if name))


def _remember(table: dict[Any, Any], key: object, value: object) -> None:
    table[key] = value
    while len(table) > REMEMBERED:
        del table[next(iter(table))]
