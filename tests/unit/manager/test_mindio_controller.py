"""What MindIO's controller and Ascend's agents are ordered to do for each signal of clusterd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from taskd.ascend.mindio import Faults, InProcessEngine
from taskd.ascend.mindio_controller import MindioController
from taskd.model.clusterd import Report, Signal
from taskd.model.faults import Fault
from taskd.model.ids import Incident, NodeRank, Position, Rank, agent
from taskd.model.messages import Body, ExitAgent, RestartWorkers

PATIENCE_S = 20.0


class Engine(InProcessEngine):
    """Stands in for Huawei's package: notes the orders, and reports nothing."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self.note = note

    def start(self, frame: str) -> None:
        self.note("start")

    def destroy(self) -> None:
        self.note("destroy")

    def change_strategy(self, strategy: str, params: str = "") -> None:
        self.note((str(strategy), params) if params else str(strategy))

    def prepare_action(self, action: str, faults: Faults) -> None:
        self.note(action)


def carried_out(*signals: Signal) -> list[object]:
    """The orders to the controller and the messages to agents, in their sequence."""

    async def main() -> list[object]:
        noted: list[object] = []

        def send(to: Position, body: Body) -> None:
            noted.append((to, body))

        def report(report: Report) -> None:
            raise AssertionError(f"unexpected: {report}")

        def engine(controller: MindioController) -> Engine:
            return Engine(noted.append)

        controller = MindioController(report, send, lambda: (), engine)
        for signal in signals:
            controller.handle(signal)
        async with asyncio.timeout(PATIENCE_S):
            await controller.close()
        await asyncio.sleep(0)  # what its thread has passed to this loop
        return [item for item in noted if item != "destroy"]

    return asyncio.run(main())


def order(kind: str, *actions: str, uuid: str = "u", **more: Any) -> Signal:
    lost, none = (Fault(Rank(3)),), Incident(0)
    return Signal(uuid=uuid, incident=none, type=kind, actions=actions, faults=lost, **more)


def test_repeated_signal_is_carried_out_once() -> None:
    change = order("changeStrategy", "change_strategy", strategy="retry")
    assert carried_out(change, change) == ["retry"]


def test_signals_without_a_uuid_are_all_carried_out() -> None:
    """Ascend's clusterd gives hot switches none, and repeats no signal."""
    begin, stop = (order("hot-switch", what, uuid="") for what in ("hot switch", "stop switch"))
    assert carried_out(begin, stop, begin, stop) == ["hot switch", "stop switch"] * 2


@pytest.mark.parametrize("actions", [("change_strategy",), ("change_strategy", "fault_nodes_exit")])
def test_no_agent_exits_before_its_ranks_have_written_the_checkpoint(
    actions: tuple[str, ...],
) -> None:
    """The order to exit follows, when the controller has reported that it is written."""
    dump = order("changeStrategy", *actions, strategy="dump", nodes=(NodeRank(1),))
    assert carried_out(dump) == ["dump"]


def test_agents_exit_before_a_recovery_and_restart_ranks_after_the_order_in_place() -> None:
    nodes = (NodeRank(1),)
    recover = order("changeStrategy", "change_strategy", strategy="recover", nodes=nodes)
    assert carried_out(recover) == [(agent(1), ExitAgent()), "recover"]
    in_place = order(
        "changeStrategy",
        "change_strategy",
        "fault_nodes_restart",
        strategy="recover",
        nodes=nodes,
        extra="recover-in-place",
    )
    assert carried_out(in_place) == [
        ("recover", "recover-in-place"),
        (agent(1), RestartWorkers((Rank(3),))),
    ]


@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        ("downgrade", '{"scale-in-strategy": "DP"}'),
        ("upgrade", '{"scale-out-strategy": "DP"}'),
    ],
)
def test_parameters_of_a_strategy_reach_the_controller(strategy: str, params: str) -> None:
    change = order("changeStrategy", "change_strategy", strategy=strategy, extra=params)
    assert carried_out(change) == [(strategy, params)]
