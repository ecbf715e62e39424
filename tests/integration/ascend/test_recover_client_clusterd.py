"""The documented recover clients against a real clusterd process, through whole rounds."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from mindx_elastic import recover_manager as elastic
from taskd.ascend import mindio
from taskd.ascend.mindio import InProcessEngine
from taskd.python.toolkit.recover_module import DLRecoverManager
from taskd.python.toolkit.recover_module.shared_data import shared_data_inst
from taskd.runtime.retry import Tries, every
from taskd.runtime.tokens import job_scope, token_for
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.ascend.test_recover_client_secure import certificate

WAIT_S = 30.0
INFO = pb.ClientInfo(jobId="job-1", role="master agent")


class Clusterd:
    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._arguments = ["--journal", str(folder / "journal"), *arguments]
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        listen = ["--listen", self.address]
        code = "import sys; from taskd.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "clusterd", *listen, *self._arguments]
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)


class QueueEngine(InProcessEngine):
    """Passes every order to the test, which reports when it is done."""

    def __init__(self, reports: Any) -> None:
        super().__init__(reports)
        self.orders: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def stop_train(self, *arguments: Any) -> None:
        self.orders.put(("stop", *arguments))

    def on_global_rank(self, faults: Any, timeout: int | None = None) -> None:
        self.orders.put(("global", faults))

    def change_strategy(self, strategy: str, params: str = "") -> None:
        self.orders.put(("change", strategy))

    def next(self) -> tuple[Any, ...]:
        return self.orders.get(timeout=WAIT_S)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RETRY_S", "BACKOFF_LIMIT_S", "HEALTH_INTERVAL_S"):
        monkeypatch.setenv(f"TASKD_RECOVER_{name}", "0.1")
    mindio.use(QueueEngine)
    yield
    mindio.use(None)
    shared_data_inst.set_kill_flag(False)
    for kind in (DLRecoverManager, elastic.DLRecoverManager):
        if kind.instance is not None:
            kind.instance.close()
            kind.instance = None


def follow(client: DLRecoverManager) -> QueueEngine:
    threading.Thread(target=client.start_subscribe, daemon=True).start()
    assert client.register_event.wait(WAIT_S)
    assert isinstance(client.engine, QueueEngine)
    return client.engine


def run_round(client: DLRecoverManager, orders: QueueEngine) -> None:
    assert client.report_process_fault({3: 2}) == 0
    assert orders.next() == ("stop", {3: 2}, "stop")
    assert client.report_stop_complete(0, "stopped", {3: 2}) == 0
    assert orders.next() == ("global", {3: 2})
    assert client.report_recover_strategy({3: 2}, ["retry", "exit"]) == 0
    assert orders.next() == ("change", "retry")
    assert client.report_recover_status(0, "recovered", {}, "retry") == 0


def test_round_from_fault_to_training(tmp_path: Path) -> None:
    clusterd = Clusterd(tmp_path)
    try:
        client = DLRecoverManager(INFO, clusterd.address)
        orders = follow(client)
        run_round(client, orders)
        run_round(client, orders)
    finally:
        clusterd.kill()


def test_round_continues_after_clusterd_was_killed(tmp_path: Path) -> None:
    clusterd = Clusterd(tmp_path)
    try:
        client = DLRecoverManager(INFO, clusterd.address)
        orders = follow(client)
        assert client.report_process_fault({3: 2}) == 0
        assert orders.next()[0] == "stop"
        clusterd.kill()
        # The answer is lost. The next clusterd repeats the signal and gets the answer again,
        # without a second order to the engine.
        with suppress(grpc.RpcError):
            client.report_stop_complete(0, "stopped", {3: 2})
        clusterd.start()
        assert orders.next() == ("global", {3: 2})
        assert client.report_recover_strategy({3: 2}, ["retry", "exit"]) == 0
        assert orders.next() == ("change", "retry")
        assert client.report_recover_status(0, "recovered", {}, "retry") == 0
        assert orders.orders.empty()
    finally:
        clusterd.kill()


def test_round_with_encryption_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, crt = certificate()
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "crt").write_bytes(crt)
    (tmp_path / "tokens").write_text("secret s3cret\n")
    clusterd = Clusterd(
        tmp_path,
        *("--tls", str(tmp_path / "key"), str(tmp_path / "crt")),
        *("--tokens", str(tmp_path / "tokens")),
    )
    try:
        info = elastic.pb.ClientInfo(ip="10.0.0.1", taskId="job-1", role="master agent")
        monkeypatch.setenv("TASKD_CLUSTERD_TOKEN", token_for("s3cret", job_scope("job-2")))
        client = elastic.DLRecoverManager(info, clusterd.address, cert_path=str(tmp_path / "crt"))
        grpc.channel_ready_future(client.grpc_channel._channel).result(WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            client.register(info)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        monkeypatch.setenv("TASKD_CLUSTERD_TOKEN", token_for("s3cret", job_scope("job-1")))
        client = elastic.DLRecoverManager(info, clusterd.address, cert_path=str(tmp_path / "crt"))
        run_round(client, follow(client))
        assert elastic.report_process_fault({1: 1}) == 0
    finally:
        clusterd.kill()


def test_token_and_certificate_are_renewed_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in ("key", "crt", "trusted", "tokens", "token")}

    def issue() -> None:
        for name, pem in zip(("key", "crt"), certificate(), strict=True):
            files[name].write_bytes(pem)

    issue()
    files["trusted"].write_bytes(files["crt"].read_bytes())
    files["tokens"].write_text("job:job-1 old\n")
    files["token"].write_text("old\n")
    monkeypatch.delenv("TASKD_CLUSTERD_TOKEN", raising=False)
    monkeypatch.setenv("TASKD_CLUSTERD_TOKEN_FILE", str(files["token"]))
    encrypted = "--tls", str(files["key"]), str(files["crt"])
    clusterd = Clusterd(tmp_path, *encrypted, "--tokens", str(files["tokens"]))
    try:
        info = elastic.pb.ClientInfo(ip="10.0.0.1", taskId="job-1", role="master agent")
        client = elastic.DLRecoverManager(info, clusterd.address, cert_path=str(files["trusted"]))
        orders = follow(client)
        run_round(client, orders)
        files["token"].write_text("new\n")
        files["tokens"].write_text("job:job-1 new\n")
        run_round(client, orders)
        clusterd.kill()
        files["trusted"].write_text("half written")
        issue()
        clusterd.start()
        for _ in Tries(every(0.5), at_most=4):
            with pytest.raises((grpc.RpcError, ValueError)):
                client.report_process_fault({3: 2})
        files["trusted"].write_bytes(files["crt"].read_bytes())
        for _ in Tries(every(0.1), at_most=300):
            with suppress(grpc.RpcError, ValueError):
                if client.register(info).code == 0:
                    break
        run_round(client, orders)
    finally:
        clusterd.kill()


def test_without_mindio_the_job_exits(tmp_path: Path) -> None:
    mindio.use(None)
    clusterd = Clusterd(tmp_path)
    try:
        client = DLRecoverManager(INFO, clusterd.address)
        strategies: queue.Queue[str] = queue.Queue()
        client.action_func_map["change_strategy"] = strategies.put
        threading.Thread(target=client.start_subscribe, daemon=True).start()
        assert client.register_event.wait(WAIT_S)
        assert client.report_process_fault({3: 1}) == 0
        assert strategies.get(timeout=WAIT_S) == "exit"
    finally:
        clusterd.kill()
