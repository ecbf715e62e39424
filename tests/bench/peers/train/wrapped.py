"""The job inside NVIDIA's in-process restart: the function is called again, the process stays.

Five processes are started (nvrx.py); four are active, one waits in reserve and becomes active when
another is lost. All choices favour the extension: intervals far below their defaults, all lazy
imports done before the start, an abort that frees ranks from gloo (its own does so for NCCL only),
and old groups are kept, so that the destructor of gloo cannot block the process.
"""

# No postponed annotations here: the wrapper looks for its own class in the annotation below.
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.bench.peers.links import connections, cut
from tests.bench.peers.train.restarted import train
from tests.bench.peers.workload import WORLD, build_model, build_optimizer, warm

SOON = timedelta(milliseconds=100)
SELDOM = timedelta(seconds=5)
"""For a wait that an event ends anyway: each timeout may stall the store of torch."""
GROUP_LIMIT = timedelta(seconds=5)
links: set[int] = set()
"""The connections of the group that the current attempt trains in."""


retired: list[DDP] = []


class CutLinks(inprocess.abort.Abort):  # type: ignore[misc]
    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        cut(links)
        return state


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(WORLD),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), CutLinks()),
    monitor_thread_interval=SELDOM,
    monitor_process_interval=SOON,
    heartbeat_interval=SOON,
    progress_watchdog_interval=SOON,
    last_call_wait=SOON,
)
def attempt(call: inprocess.CallWrapper = None) -> None:
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    others = connections()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(str(call.iteration), store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=GROUP_LIMIT,
    )
    links.clear()
    links.update(connections() - others)
    train(retired)


if __name__ == "__main__":
    model = build_model()
    warm(model, build_optimizer(model))
    attempt()
