"""torchrun with restarts: all processes start anew and read their checkpoint.

Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE the restarted ranks of torch 2.13 may read the dead
attempt's gloo addresses from the agent's store and never meet; it is set in torchrun's favour.
"""

from __future__ import annotations

import sys

from tests.bench.peers.trial import ROOT, Outcome, Trial, survive
from tests.bench.peers.workload import WORLD

SCRIPT = ROOT / "tests/bench/peers/train/restarted.py"
MONITOR_S = "0.1"
"""torchrun's own default: how often the agent looks at its workers."""


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
