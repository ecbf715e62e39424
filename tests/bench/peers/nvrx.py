"""NVIDIA's resiliency extension: in-job restart by its launcher, in-process restart with a spare.

The launcher restarts all processes like torchrun, with a monitor per rank; the script reads the
same checkpoint. For in-process restart there is no launcher that leaves the other ranks alive, so
this module starts the five processes itself, like srun without `--kill-on-bad-exit`.
"""

from __future__ import annotations

from torch.distributed import TCPStore

from tests import ROOT
from tests.bench.peers.ports import free_ports
from tests.bench.peers.torchrun import SCRIPT
from tests.bench.peers.trial import Outcome, Trial, survive
from tests.bench.peers.venvs import peer_bin
from tests.bench.peers.workload import WORLD

WRAPPED = ROOT / "tests/bench/peers/train/wrapped.py"


def trial_in_job() -> Outcome:
    with Trial() as job:
        job.start(
            [
                peer_bin("nvrx") / "ft_launcher",
                *("--standalone", "--nnodes", "1", "--nproc-per-node", str(WORLD)),
                *("--max-restarts", "3", "--monitor-interval", "0.1"),
                "--ignore-missing-fault-tol-cfg",
                SCRIPT,
            ],
            env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        return survive(job)


def trial_in_process() -> Outcome:
    """This process holds the store of the training's groups, as in the floor."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (port,) = free_ports(1)
    with Trial() as job:
        for rank in range(WORLD + 1):
            job.start(
                [peer_bin("nvrx") / "python", WRAPPED, str(store.port)],
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD + 1),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                name=f"process{rank}",
            )
        return survive(job)
