"""`DLRecoverManager` against a scripted clusterd: joining, signals, reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from taskd.ascend import mindio
from taskd.ascend.mindio import InProcessEngine
from taskd.python.toolkit.recover_module import DLRecoverManager, recover_manager
from taskd.python.toolkit.recover_module.pb import recover_pb2 as pb
from taskd.python.toolkit.recover_module.shared_data import shared_data_inst
from tests.integration.ascend.recover_server import Running

WAIT_S = 20.0
INFO = pb.ClientInfo(jobId="job-1", role="master agent")


class Recorder(InProcessEngine):
    """Records the orders and answers none."""

    def __init__(self, reports: Any) -> None:
        super().__init__(reports)
        self.orders: list[tuple[Any, ...]] = []
        self.recorded = threading.Condition()

    def record(self, *order: Any) -> None:
        with self.recorded:
            self.orders.append(order)
            self.recorded.notify_all()

    def wait_for(self, count: int) -> list[tuple[Any, ...]]:
        with self.recorded:
            assert self.recorded.wait_for(lambda: len(self.orders) >= count, WAIT_S), self.orders
            return list(self.orders)

    def start(self, frame: str) -> None:
        self.record("start", frame)

    def destroy(self) -> None:
        self.record("destroy")

    def save_and_exit(self) -> None:
        self.record("save_and_exit")

    def stop_train(self, *arguments: Any) -> None:
        self.record("stop_train", *arguments)

    def on_global_rank(self, *arguments: Any) -> None:
        self.record("on_global_rank", *arguments)

    def change_strategy(self, *arguments: Any) -> None:
        self.record("change_strategy", *arguments)

    def prepare_action(self, *arguments: Any) -> None:
        self.record("prepare_action", *arguments)


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {
        "RETRY_S": "0.05",
        "BACKOFF_LIMIT_S": "0.05",
        "HEALTH_INTERVAL_S": "0.05",
        "HEALTH_PAUSE_S": "0.2",
    }.items():
        monkeypatch.setenv(f"TASKD_RECOVER_{name}", value)
    yield
    mindio.use(None)
    shared_data_inst.set_exit_flag(False)
    shared_data_inst.set_kill_flag(False)
    if DLRecoverManager.instance is not None:
        DLRecoverManager.instance.close()
        DLRecoverManager.instance = None


@pytest.fixture
def client(server: Running) -> DLRecoverManager:
    mindio.use(Recorder)
    return DLRecoverManager(INFO, server.address)


@pytest.fixture
def orders(client: DLRecoverManager) -> Recorder:
    assert isinstance(client.engine, Recorder)
    return client.engine


@pytest.fixture
def subscribed(client: DLRecoverManager, server: Running) -> Iterator[threading.Thread]:
    thread = in_thread(client.start_subscribe)
    server.clusterd.next_call("Subscribe")
    yield thread
    client.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# Joining


def test_init_and_register(client: DLRecoverManager, server: Running) -> None:
    assert client.init_clusterd() is True
    assert client.register(INFO).code == 0
    assert server.clusterd.next_call("Init") == INFO
    assert server.clusterd.next_call("Register") == INFO


def test_init_is_repeated_until_it_succeeds(client: DLRecoverManager, server: Running) -> None:
    def unavailable(context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    server.clusterd.answers["Init"] = [402, unavailable, 599, 0]
    channel = client.grpc_channel
    assert client.init_clusterd() is True
    assert server.clusterd.calls.qsize() == 4
    assert client.grpc_channel is not channel


def test_client_stops_if_recovery_is_off(client: DLRecoverManager, server: Running) -> None:
    server.clusterd.answers["Init"] = [408, 403]
    assert client.init_clusterd() is False
    server.clusterd.answers["Init"] = [403]
    client.start_subscribe()  # Returns instead of trying again.
    assert not client.register_event.is_set()
    assert client.report_process_fault({1: 1}) == 0  # Single calls still work,
    assert client.init_clusterd() is True  # and so does the next attempt.


def test_call_without_an_answer_has_a_deadline(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_RECOVER_RPC_TIMEOUT_S", "0.2")
    never = threading.Event()
    server.clusterd.answers["Register"] = [lambda context: never.wait(WAIT_S) and 0]
    client = DLRecoverManager(INFO, server.address)
    with pytest.raises(grpc.RpcError) as caught:
        client.register(INFO)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    never.set()


def test_token_is_sent(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_CLUSTERD_TOKEN", "sesame")
    DLRecoverManager(INFO, server.address).register(INFO)
    assert server.clusterd.metadata[0]["authorization"] == "Bearer sesame"


def test_constructing_again_reconnects_the_same_instance(
    client: DLRecoverManager, server: Running
) -> None:
    before = client.grpc_channel
    again = DLRecoverManager(INFO, server.address)
    assert again is client is DLRecoverManager.instance
    assert again.grpc_channel is not before
    assert again.init_clusterd()


# Signals


def test_actions_are_carried_out_once_and_in_order(
    server: Running, subscribed: threading.Thread, orders: Recorder
) -> None:
    faults = [pb.FaultRank(rankId="3", faultType="1"), pb.FaultRank(rankId="x", faultType="1")]
    known = {3: 1}
    server.clusterd.push("stopTrain", "stop_train", "stop_train", faultRanks=faults)
    server.clusterd.push("keep-alive")
    server.clusterd.push("stopTrain", "stop_train", job="job-2")
    server.clusterd.push("globalFault", "on_global_rank", "fault_nodes_exit", faultRanks=faults)
    server.clusterd.push("globalFault", "on_global_rank", faultRanks=faults, timeout=33)
    server.clusterd.push("changeStrategy", "change_strategy", changeStrategy="recover")
    server.clusterd.push("stopTrain", "pause_train", timeout=900)
    server.clusterd.push("hot-switch", "hot switch", "new pod running", faultRanks=faults)
    server.clusterd.push("hot-switch", "stop switch")
    server.clusterd.push("saveAndExit", "save_and_exit", "change_strategy", changeStrategy="exit")
    assert orders.wait_for(9) == [
        ("stop_train", known, "stop"),
        ("on_global_rank", known),
        ("on_global_rank", known, 33),
        ("change_strategy", "recover"),
        ("stop_train", {}, "pause", 900),
        ("prepare_action", "hot switch", known),
        ("prepare_action", "stop switch", {}),
        ("save_and_exit",),
        ("change_strategy", "exit"),
    ]


@pytest.mark.parametrize(
    ("limit", "seconds"), [(None, 600), ("100", 250), ("9999", 7200), ("-1", 600), ("x", 600)]
)
def test_pause_without_a_timeout_takes_it_from_the_environment(
    client: DLRecoverManager,
    orders: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
    seconds: int,
) -> None:
    if limit is None:
        monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    else:
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", limit)
    client.do_action("pause_train", recover_manager.ProtoBufData({1: 0}, "", 0))
    assert orders.orders == [("stop_train", {1: 0}, "pause", seconds)]
    assert client._get_hccl_switch_nic_timeout() == seconds


def test_private_names_that_other_programs_call(client: DLRecoverManager, orders: Recorder) -> None:
    data = recover_manager.ProtoBufData(fault_ranks={1: 0}, change_strategy="retry", timeout=0)
    client._DLRecoverManager__do_action("change_strategy", data)  # type: ignore[attr-defined]
    signal = pb.ProcessManageSignal(
        jobId="job-1",
        signalType="changeStrategy",
        actions=["change_strategy"],
        changeStrategy="dump",
    )
    client._DLRecoverManager__signal_pipe_line(signal)  # type: ignore[attr-defined]
    assert orders.orders == [("change_strategy", "retry"), ("change_strategy", "dump")]
    shrink = '{"scale-in-strategy": "DP"}'
    client.do_action("change_strategy", recover_manager.ProtoBufData({}, "downgrade", 0, shrink))
    assert orders.orders[-1] == ("change_strategy", "downgrade", shrink)
    called: list[object] = []
    client.action_func_map = {"stop_train": lambda *arguments: called.append(arguments)}
    client._DLRecoverManager__do_action("stop_train", data)  # type: ignore[attr-defined]
    assert called == [({1: 0}, "stop")]


def test_ended_stream_is_subscribed_again(
    server: Running, subscribed: threading.Thread, orders: Recorder
) -> None:
    server.clusterd.signals.put(None)
    server.clusterd.next_call("Subscribe")
    server.clusterd.push("changeStrategy", "change_strategy", changeStrategy="retry")
    assert orders.wait_for(1) == [("change_strategy", "retry")]


def test_client_returns_to_a_restarted_server(
    client: DLRecoverManager, server: Running, subscribed: threading.Thread, orders: Recorder
) -> None:
    server.stop()
    successor = Running(port=server.port)
    try:
        successor.clusterd.next_call("Init")
        successor.clusterd.next_call("Register")
        successor.clusterd.next_call("Subscribe")
        successor.clusterd.push("changeStrategy", "change_strategy", changeStrategy="retry")
        assert orders.wait_for(1) == [("change_strategy", "retry")]
    finally:
        client.close()
        subscribed.join(WAIT_S)
        successor.stop()


def test_silent_subscription_is_renewed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_RECOVER_SILENCE_S", "0.3")
    client = DLRecoverManager(INFO, server.address)
    thread = in_thread(client.start_subscribe)
    server.clusterd.next_call("Subscribe")
    server.clusterd.next_call("Subscribe")  # No message came, so the client subscribed again.
    client.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_failed_health_check_registers_again(server: Running, subscribed: threading.Thread) -> None:
    server.clusterd.next_call("HealthCheck")
    server.clusterd.answers["HealthCheck"] = [
        lambda context: context.abort(grpc.StatusCode.INTERNAL, "broken")
    ]
    server.clusterd.next_call("Init")
    server.clusterd.next_call("Register")


def test_server_without_health_checks_is_asked_once_and_silence_is_still_detected(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_RECOVER_SILENCE_S", "0.5")
    refuse = lambda context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "what?")  # noqa: E731
    server.clusterd.answers["HealthCheck"] = [refuse] * 100
    client = DLRecoverManager(INFO, server.address)
    thread = in_thread(client.start_subscribe)
    server.clusterd.next_call("HealthCheck")
    server.clusterd.next_call("Subscribe")  # No message came for too long.
    client.close()
    thread.join(WAIT_S)
    assert len(server.clusterd.answers["HealthCheck"]) == 99


def test_constructing_again_ends_the_previous_subscription(
    client: DLRecoverManager, server: Running, subscribed: threading.Thread
) -> None:
    again = DLRecoverManager(INFO, server.address)
    subscribed.join(WAIT_S)
    assert not subscribed.is_alive()
    assert again.init_clusterd()


def test_kill_master_ends_the_subscription(
    server: Running, client: DLRecoverManager, subscribed: threading.Thread, orders: Recorder
) -> None:
    server.clusterd.push("killMaster")
    subscribed.join(WAIT_S)
    assert not subscribed.is_alive()
    assert orders.orders == [("destroy",)]
    assert shared_data_inst.get_kill_flag()


def test_kill_flag_ends_the_subscription(subscribed: threading.Thread) -> None:
    shared_data_inst.set_kill_flag(True)
    subscribed.join(WAIT_S)
    assert not subscribed.is_alive()


def test_exit_flag_restarts_the_engine(
    server: Running, client: DLRecoverManager, orders: Recorder
) -> None:
    thread = in_thread(lambda: client.start_subscribe("mindspore"))
    server.clusterd.next_call("Subscribe")
    shared_data_inst.set_exit_flag(True)
    server.clusterd.next_call("Subscribe")
    assert orders.orders == [("destroy",), ("start", "mindspore")]
    assert not shared_data_inst.get_exit_flag()
    client.close()
    thread.join(WAIT_S)


def test_engine_that_hangs_or_raises_does_not_end_the_subscription(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_RECOVER_ACTION_TIMEOUT_S", "0.2")
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    never = threading.Event()

    class Bad(Recorder):
        def stop_train(self, *arguments: Any) -> None:
            never.wait(WAIT_S)

        def save_and_exit(self) -> None:
            raise Exception("unexpected")

    mindio.use(Bad)
    client = DLRecoverManager(INFO, server.address)
    thread = in_thread(client.start_subscribe)
    server.clusterd.next_call("Subscribe")
    server.clusterd.push("stopTrain", "stop_train")
    server.clusterd.push("saveAndExit", "save_and_exit")
    server.clusterd.push("changeStrategy", "change_strategy", changeStrategy="exit")
    assert isinstance(client.engine, Bad)
    assert client.engine.wait_for(1) == [("change_strategy", "exit")]
    never.set()
    client.close()
    thread.join(WAIT_S)


# Reporting


def test_reports_have_the_documented_fields(client: DLRecoverManager, server: Running) -> None:
    clusterd = server.clusterd
    assert recover_manager.report_stop_complete(0, "stopped", {1: 0, 2: 2}) == 0
    request = clusterd.next_call("ReportStopComplete")
    assert (request.jobId, request.status.info) == ("job-1", "stopped")
    assert [(fault.rankId, fault.faultType) for fault in request.faultRanks] == [
        ("1", "0"),
        ("2", "2"),
    ]
    assert recover_manager.report_recover_strategy({1: 0}, ["retry", "exit"]) == 0
    assert list(clusterd.next_call("ReportRecoverStrategy").strategies) == ["retry", "exit"]
    assert recover_manager.report_recover_status(201, "leaving", {4: 1, 5: 1}, "downgrade") == 0
    request = clusterd.next_call("ReportRecoverStatus")
    assert (request.status.code, request.strategy) == (201, "downgrade")
    assert list(request.isolateRankIds) == ["4", "5"]
    assert recover_manager.report_process_fault({7: 1}) == 0
    assert clusterd.next_call("ReportProcessFault").faultRanks[0].rankId == "7"
    assert recover_manager.report_process_fault({7: 1}, {7: "0x1234"}) == 0
    assert list(clusterd.next_call("ReportProcessFault").evidence) == ["0x1234"]


def test_refused_report_is_sent_again_once_after_registering(
    client: DLRecoverManager, server: Running
) -> None:
    server.clusterd.answers["ReportProcessFault"] = [400, 0]
    assert recover_manager.report_process_fault({7: 1}) == 0
    names = [server.clusterd.calls.get(timeout=WAIT_S)[0] for _ in range(3)]
    assert names == ["ReportProcessFault", "Register", "ReportProcessFault"]
    server.clusterd.answers["ReportStopComplete"] = [401, 401, 0]
    assert recover_manager.report_stop_complete(0, "", {}) == 401


def test_reports_carry_the_uuid_of_their_signal(
    client: DLRecoverManager, server: Running, subscribed: threading.Thread, orders: Recorder
) -> None:
    server.clusterd.push("stopTrain", "stop_train", uuid="a")
    server.clusterd.push("globalFault", "on_global_rank", uuid="a")
    server.clusterd.push("changeStrategy", "change_strategy", uuid="b", changeStrategy="retry")
    orders.wait_for(3)
    client.report_stop_complete(0, "", {})
    assert server.clusterd.next_call("ReportStopComplete").uuid == "a"
    client.report_recover_strategy({}, ["retry"])
    assert server.clusterd.next_call("ReportRecoverStrategy").uuid == "a"
    client.report_recover_status(0, "", {}, "retry")
    assert server.clusterd.next_call("ReportRecoverStatus").uuid == "b"


def test_repeated_signal_is_answered_again_but_not_carried_out(
    client: DLRecoverManager, server: Running, subscribed: threading.Thread, orders: Recorder
) -> None:
    server.clusterd.push("stopTrain", "stop_train", uuid="a", sequence=4)
    server.clusterd.push("stopTrain", "stop_train", uuid="a", sequence=4)  # In progress: no answer.
    orders.wait_for(1)
    client.report_stop_complete(0, "done", {})
    assert server.clusterd.next_call("ReportStopComplete").status.info == "done"
    server.clusterd.push("stopTrain", "stop_train", uuid="a", sequence=4)
    assert server.clusterd.next_call("ReportStopComplete").uuid == "a"
    server.clusterd.push("stopTrain", "stop_train", uuid="b", sequence=5)
    assert len(orders.wait_for(2)) == 2


def test_without_mindio_all_orders_are_refused_at_once(server: Running) -> None:
    client = DLRecoverManager(INFO, server.address)
    assert type(client.engine) is InProcessEngine
    thread = in_thread(client.start_subscribe)
    server.clusterd.next_call("Subscribe")
    fault = pb.FaultRank(rankId="3", faultType="1")
    server.clusterd.push("stopTrain", "stop_train", uuid="a", faultRanks=[fault])
    request = server.clusterd.next_call("ReportStopComplete")
    assert (request.status.code, request.uuid) == (499, "a")
    assert "mindio_ttp" in request.status.info
    server.clusterd.push("globalFault", "on_global_rank", uuid="a", faultRanks=[fault])
    assert list(server.clusterd.next_call("ReportRecoverStrategy").strategies) == ["exit"]
    server.clusterd.push("changeStrategy", "change_strategy", uuid="a", changeStrategy="retry")
    assert server.clusterd.next_call("ReportRecoverStatus").status.code == 499
    server.clusterd.push("saveAndExit", "save_and_exit")
    assert server.clusterd.next_call("ReportRecoverStatus").status.code == 407
    client.close()
    thread.join(WAIT_S)


# Module functions


def test_environment_names_job_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_PROXY_ENABLE", raising=False)
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    monkeypatch.setenv("MINDX_SERVER_IP", "10.0.0.9")
    with pytest.raises(ValueError, match="MINDX_TASK_ID"):
        recover_manager.init_grpc_recover_manager()
    monkeypatch.setenv("MINDX_TASK_ID", "job-9")
    client = recover_manager.init_grpc_recover_manager()
    assert client.server_addr == "10.0.0.9:8899"
    assert (client.client_info.jobId, client.client_info.role) == ("job-9", "master agent")
    monkeypatch.setenv("MINDX_SERVER_IP", "fd00::1")
    assert recover_manager.init_grpc_recover_manager().server_addr == "[fd00::1]:8899"
    monkeypatch.setenv("LOCAL_PROXY_ENABLE", "on")
    assert recover_manager.init_grpc_recover_manager().server_addr == "127.0.0.1:8899"
    monkeypatch.delenv("LOCAL_PROXY_ENABLE")
    monkeypatch.delenv("MINDX_SERVER_IP")
    with pytest.raises(ValueError, match="MINDX_SERVER_IP"):
        recover_manager.init_grpc_recover_manager()


def test_get_instance(client: DLRecoverManager) -> None:
    assert recover_manager.get_instance(DLRecoverManager) is client
    assert recover_manager.get_recover_manager_instance() is client
    with pytest.raises(TypeError):
        recover_manager.get_instance(int)
    client.close()
    DLRecoverManager.instance = None
    with pytest.raises(RuntimeError):
        recover_manager.get_instance(DLRecoverManager)


def test_controller_requires_its_variables(
    client: DLRecoverManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "POD_IP", "TTP_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE, POD_IP, TTP_PORT"):
        recover_manager.init_mindio_controller()
    with pytest.raises(ValueError, match="'jax'"):
        recover_manager.init_mindio_controller("jax")
