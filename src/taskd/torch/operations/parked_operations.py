"""What a rank may be asked to do while it stands still: see `stress.py` and `switch.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskd import config
from taskd.bus.endpoint import BusConfig
from taskd.model.ids import Rank, worker
from taskd.torch.operations.device_tests import StressSettings, StressTest
from taskd.torch.operations.nic_switch import Switcher
from taskd.worker import bus_connection
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.operations.stress_order import StressTester
from taskd.worker.settings import WorkerSettings


def offer(
    settings: WorkerSettings,
    rank: int,
    store: str,
    backends: dict[str, str],
    world: Callable[[], Sequence[int]],
) -> None:
    """From now on the manager's orders are heard. The link is there already and carries them."""
    told = config.load(StressSettings, prefix="TASKD_STRESS")
    test = StressTest(told, store, backends)
    tester = StressTester(Rank(rank), test.operations())
    bus = BusConfig(me=worker(settings.node_rank, rank), upstream=settings.proxy)
    bus_connection.subscribe(tester, bus)
    switcher = Switcher(rank, store, backends, world)
    bus_connection.subscribe(NicSwitcher(switcher.switch), bus)
