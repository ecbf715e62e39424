"""torchrun with restarts: all processes start again and read their checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set in favour of torchrun: without it, the restarted ranks of
torch 2.13 may read the gloo addresses of the failed attempt from the agent's store and never meet.
"""

from __future__ import annotations

import sys

from tests import ROOT
from tests.bench.peers.trial import Outcome, Trial, survive
from tests.bench.peers.workload import WORLD

SCRIPT = ROOT / "tests/bench/peers/train/restarted.py"
MONITOR_S = "0.1"
"""How often the agent checks its workers; the default of torchrun."""


def trial() -> Outcome:
    with Trial() as job:
        job.start(
            [
                sys.executable,
                *("-m", "torch.distributed.run"),
                *("--standalone", "--nnodes", "1", "--nproc-per-node", str(WORLD)),
                *("--max-restarts", "3", "--monitor-interval", MONITOR_S),
                SCRIPT,
            ],
            env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        return survive(job)
