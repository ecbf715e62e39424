"""The order to switch the NIC inside a rank: each process answers it exactly once."""

from __future__ import annotations

import queue

import pytest

from taskd.model import messages as m
from taskd.model.ids import Rank
from taskd.worker import bus_connection
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.worker_api import Worker, WorkerArguments

DEADLINE_S = 20.0
ORDER = m.SwitchNic("u", (Rank(0),), (True,))


def switches(order: m.SwitchNic) -> None:
    assert order == ORDER


@pytest.mark.parametrize("error", [AttributeError, ImportError, KeyError, OSError, RuntimeError])
def test_any_error_is_answered_with_a_failure(error: type[Exception]) -> None:
    def fails(order: m.SwitchNic) -> None:
        raise error("no such call")

    sent: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(fails)
    switcher.joined(sent.put)
    switcher.received(ORDER)
    assert sent.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)


def test_order_whose_lists_differ_in_length_is_refused() -> None:
    sent: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(lambda order: None)
    switcher.joined(sent.put)
    switcher.received(m.SwitchNic("u", (Rank(0), Rank(1)), (True,)))
    assert sent.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)


def test_answer_is_sent_again_after_reconnecting_and_for_a_repeated_order() -> None:
    sent: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(switches)
    switcher.received(m.SwitchNic("", (), ()))
    switcher.joined(sent.put)
    switcher.received(ORDER)
    done = sent.get(timeout=DEADLINE_S)
    assert done == m.NicSwitched("u", True)
    switcher.received(ORDER)
    switcher.joined(sent.put)
    assert [sent.get_nowait(), sent.get_nowait()] == [done, done]


def test_worker_does_not_answer_where_in_process_recovery_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ascend's packages are not installed here: the worker itself would answer with a failure."""
    first: queue.Queue[m.Body] = queue.Queue()
    second: queue.Queue[m.Body] = queue.Queue()
    worker, switcher = Worker(WorkerArguments(0, 0, 20, "pt")), NicSwitcher(switches)
    worker.accept_operations()
    monkeypatch.setattr(bus_connection, "_subscribers", [worker, switcher])
    switcher.joined(first.put)
    bus_connection.publish(ORDER)
    assert first.get(timeout=DEADLINE_S) == m.NicSwitched("u", True)
    worker.joined(second.put)
    assert [type(second.get_nowait()) for _ in range(second.qsize())] == [
        m.WorkerRegistered,
        m.ProfilingSet,
    ]
    monkeypatch.setattr(bus_connection, "_subscribers", [worker])
    bus_connection.publish(ORDER)
    assert second.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)
