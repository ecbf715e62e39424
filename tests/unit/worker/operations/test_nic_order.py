"""The order to switch inside a rank: always answered, once by each process."""

from __future__ import annotations

import queue

import pytest

from taskd.model import messages as m
from taskd.model.ids import Rank
from taskd.worker import bus_connection as line
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.worker_api import Identity, Worker

DEADLINE_S = 20.0
ORDER = m.SwitchNic("u", (Rank(0),), (True,))


def moves(order: m.SwitchNic) -> None:
    assert order == ORDER


@pytest.mark.parametrize("error", [AttributeError, ImportError, KeyError, OSError, RuntimeError])
def test_whatever_goes_wrong_is_an_answer(error: type[Exception]) -> None:
    def breaks(order: m.SwitchNic) -> None:
        raise error("no such call")

    said: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(breaks)
    switcher.joined(said.put)
    switcher.heard(ORDER)
    assert said.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)


def test_an_order_that_does_not_say_where_to_for_each_rank_is_refused() -> None:
    said: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(lambda order: None)
    switcher.joined(said.put)
    switcher.heard(m.SwitchNic("u", (Rank(0), Rank(1)), (True,)))
    assert said.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)


def test_an_answer_is_said_again_on_a_new_line_and_to_the_same_order() -> None:
    said: queue.Queue[m.Body] = queue.Queue()
    switcher = NicSwitcher(moves)
    switcher.heard(m.SwitchNic("", (), ()))
    switcher.joined(said.put)
    switcher.heard(ORDER)
    done = said.get(timeout=DEADLINE_S)
    assert done == m.NicSwitched("u", True)
    switcher.heard(ORDER)
    switcher.joined(said.put)
    assert [said.get_nowait(), said.get_nowait()] == [done, done]


def test_where_in_process_recovery_switches_the_worker_keeps_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are no packages of the vendor here: its answer would be no."""
    first: queue.Queue[m.Body] = queue.Queue()
    second: queue.Queue[m.Body] = queue.Queue()
    worker, switcher = Worker(Identity(0, 0, 20, "pt")), NicSwitcher(moves)
    worker.operate()
    monkeypatch.setattr(line, "_riders", [worker, switcher])
    switcher.joined(first.put)
    line.heard(ORDER)
    assert first.get(timeout=DEADLINE_S) == m.NicSwitched("u", True)
    worker.joined(second.put)
    assert [type(second.get_nowait()) for _ in range(second.qsize())] == [
        m.WorkerRegistered,
        m.ProfilingSet,
    ]
    monkeypatch.setattr(line, "_riders", [worker])
    line.heard(ORDER)
    assert second.get(timeout=DEADLINE_S) == m.NicSwitched("u", False)
