"""A clusterd for tests: real gRPC, scripted answers, all requests recorded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.recover_pb2_grpc import RecoverServicer, add_RecoverServicer_to_server

OK = pb.Status(code=0, info="fine")


class ScriptedClusterd(RecoverServicer):
    """`answers[method]` are used one after the other, then OK. A callable answer is called with
    the gRPC context, so that it can abort."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.answers: dict[str, list[Any]] = {}
        self.metadata: list[dict[str, str]] = []
        self.signals: queue.Queue[pb.ProcessManageSignal | None] = queue.Queue()
        self._lock = threading.Lock()

    def next_call(self, *names: str, timeout_s: float = 20.0) -> Any:
        """The request of the next call of one of these methods; other calls are skipped."""
        while True:
            name, request = self.calls.get(timeout=timeout_s)
            if not names or name in names:
                return request

    def _answer(self, name: str, request: Any, context: grpc.ServicerContext) -> pb.Status:
        with self._lock:
            self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
            script = self.answers.get(name)
            answer = script.pop(0) if script else OK
        self.calls.put((name, request))
        if callable(answer):
            answer = answer(context)
        return answer if isinstance(answer, pb.Status) else pb.Status(code=answer)

    def Init(self, request: Any, context: Any) -> pb.Status:
        return self._answer("Init", request, context)

    def Register(self, request: Any, context: Any) -> pb.Status:
        return self._answer("Register", request, context)

    def HealthCheck(self, request: Any, context: Any) -> pb.Status:
        return self._answer("HealthCheck", request, context)

    def ReportStopComplete(self, request: Any, context: Any) -> pb.Status:
        return self._answer("ReportStopComplete", request, context)

    def ReportRecoverStrategy(self, request: Any, context: Any) -> pb.Status:
        return self._answer("ReportRecoverStrategy", request, context)

    def ReportRecoverStatus(self, request: Any, context: Any) -> pb.Status:
        return self._answer("ReportRecoverStatus", request, context)

    def ReportProcessFault(self, request: Any, context: Any) -> pb.Status:
        return self._answer("ReportProcessFault", request, context)

    def SubscribeProcessManageSignal(
        self, request: Any, context: Any
    ) -> Iterator[pb.ProcessManageSignal]:
        """Yields what the test puts into `signals`; None ends the stream."""
        self.calls.put(("Subscribe", request))
        finished = threading.Event()

        def wake() -> None:
            if not finished.is_set():
                self.signals.put(None)

        context.add_callback(wake)
        while (signal := self.signals.get()) is not None:
            yield signal
        finished.set()

    def push(self, kind: str, *actions: str, job: str = "job-1", **fields: Any) -> None:
        self.signals.put(
            pb.ProcessManageSignal(jobId=job, signalType=kind, actions=actions, **fields)
        )


class Running:
    """The service on its own port."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        self.clusterd = ScriptedClusterd()
        options = [
            # The documented clients ping every 3 s.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=options)
        add_RecoverServicer_to_server(self.clusterd, self._server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def on_unknown(self, report: Callable[[str], None]) -> None:
        """Call `report` with the name of each called method that is not implemented here."""

        class Unknown(grpc.GenericRpcHandler):  # type: ignore[type-arg]
            def service(self, details: grpc.HandlerCallDetails) -> None:
                report(details.method)

        self._server.add_generic_rpc_handlers((Unknown(),))

    def stop(self) -> None:
        self.clusterd.signals.put(None)
        self._server.stop(grace=None).wait(timeout=20)
