"""torchft: survivors continue in a smaller world; it is full again when the lost replica is back.

The layout is that of its README and its torchx component: a lighthouse, and a torchrun with
restarts per replica group. The timeouts of the lighthouse are far below their defaults, in favour
of torchft. With a spare, a fifth replica computes all the time; its gradients count from the moment
at which another replica is lost.
"""

from __future__ import annotations

from tests import ROOT
from tests.bench.peers.ports import free_ports
from tests.bench.peers.trial import Outcome, Trial, survive
from tests.bench.peers.venvs import peer_bin
from tests.bench.peers.workload import WORLD

SCRIPT = ROOT / "tests/bench/peers/train/replicas.py"
HEARTBEAT_LIMIT_MS = "1000"
JOIN_LIMIT_MS = "1000"
TICK_MS = "20"


def trial() -> Outcome:
    return _trial(WORLD)


def trial_with_spare() -> Outcome:
    return _trial(WORLD + 1)


def _trial(replicas: int) -> Outcome:
    commands = peer_bin("torchft")
    lighthouse, *masters = free_ports(1 + replicas)
    with Trial() as job:
        job.start(
            [
                commands / "torchft_lighthouse",
                *("--min_replicas", "1", "--bind", f"[::]:{lighthouse}"),
                *("--heartbeat_timeout_ms", HEARTBEAT_LIMIT_MS),
                *("--join_timeout_ms", JOIN_LIMIT_MS),
                *("--quorum_tick_ms", TICK_MS),
            ],
            name="lighthouse",
        )
        for replica, master in enumerate(masters):
            job.start(
                [
                    commands / "python",
                    *("-m", "torch.distributed.run"),
                    *("--master-port", str(master), "--nnodes", "1", "--nproc-per-node", "1"),
                    *("--max-restarts", "10", "--monitor-interval", "0.1"),
                    SCRIPT,
                ],
                env={
                    "REPLICA_GROUP_ID": str(replica),
                    "NUM_REPLICA_GROUPS": str(replicas),
                    "TORCHFT_LIGHTHOUSE": f"http://localhost:{lighthouse}",
                },
                name=f"replica{replica}",
            )
        return survive(job, spares=replicas - WORLD)
