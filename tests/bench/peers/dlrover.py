"""DLRover on one machine: its master, its agent instead of torchrun; restarts all processes.

This module starts the master, because dlrover-run 0.6.1 cannot do that with torch 2.13 (it calls a
class of torch with one argument too few). The script reads the same checkpoint file as under
torchrun; DLRover's in-memory copy would change what is loaded, not how long a restart takes.
"""

from __future__ import annotations

from tests.bench.peers.ports import free_ports
from tests.bench.peers.torchrun import SCRIPT
from tests.bench.peers.trial import Outcome, Trial, survive
from tests.bench.peers.venvs import peer_bin
from tests.bench.peers.workload import WORLD


def trial() -> Outcome:
    commands = peer_bin("dlrover")
    (port,) = free_ports(1)
    with Trial() as job:
        job.start(
            [
                commands / "python",
                *("-m", "dlrover.python.master.main", "--platform", "local"),
                *("--port", str(port), "--node_num", "1", "--job_name", "bench"),
            ],
            name="master",
        )
        job.start(
            [
                commands / "dlrover-run",
                *("--nnodes", "1", "--nproc-per-node", str(WORLD)),
                *("--max-restarts", "3", "--monitor-interval", "0.1"),
                SCRIPT,
            ],
            env={
                "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
        return survive(job)
