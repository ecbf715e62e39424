"""The environment of a worker: torchrun's variables, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from secrets import token_hex

from taskd.agent.run.plan import Plan
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.model.agent import StartWorker
from taskd.model.ids import worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Addresses that are known once everything listens; each as host:port."""

    store: str
    """Where the ranks meet at the first start."""
    proxy: str
    liveness_port: str = ""
    """A port of the agent that the manager probes to see whether the agent is alive."""


def base_environment(plan: Plan) -> dict[str, str]:
    """What all processes of the node inherit; includes what libraries read while they load."""
    env = dict(environ)
    if plan.local_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(signum.name for signum in plan.signals)
    return env


def worker_environment(plan: Plan, start: StartWorker, addresses: Addresses) -> dict[str, str]:
    node, local_rank = plan.node_and_local_rank(start.rank)
    store = start.store or addresses.store
    host, _, port = store.rpartition(":")
    whole = start.incarnation == start.attempt
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_RANK": str(start.rank),
        "ROLE_NAME": plan.role,
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(plan.agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TASKD_JOB_ID": plan.job,
        **_badge(plan, start),
        **secrets_of_ranks(plan),
        "TASKD_PROXY": addresses.proxy,
        "TASKD_NODE_RANK": str(plan.node),
        "TASKD_INCARNATION": str(start.incarnation),
        "TASKD_INCIDENT": str(start.incident),
        "TASKD_STORE": store,
        **({"TASKD_STORE_MOVES": "on"} if plan.etcd else {}),
        # Read by Ascend's in-process recovery: was the whole pod started, or only this worker?
        "RESTART_FAULT_PROCESS_TYPE": "worker" if start.incident and not whole else "pod",
        **({"TASKD_DUMP_DIR": plan.dump_dir} if plan.dump_dir else {}),
        **({"TASKD_CHECKPOINT_EVERY": str(plan.checkpoint_every)} if plan.checkpoint_every else {}),
        **({"TASKD_ENCRYPT_STATE": "on"} if plan.encrypt_state else {}),
        **_device(plan, local_rank),
        **_links(plan),
    }


def _links(plan: Plan) -> dict[str, str]:
    """Only what the command line sets: the launcher's own environment may already set the rest."""
    nics = {"TASKD_NICS": ",".join(plan.nics)} if plan.nics else {}
    return {**nics, "TASKD_NIC_FAILOVER": "on"} if plan.nic_failover else nics


def _badge(plan: Plan, start: StartWorker) -> dict[str, str]:
    """The job's token stays with the agent: a script gets a badge for its own rank only."""
    if not plan.token:
        return {"TASKD_TOKEN": "", "TASKD_BUS_TOKEN_FILE": ""}
    # Imported late because it imports gRPC, which would delay the launch.
    from taskd.bus.security import make_badge

    badge = make_badge(plan.token, plan.job, worker(plan.node, start.rank))
    return {"TASKD_TOKEN": badge, "TASKD_BUS_TOKEN_FILE": ""}


def secrets_of_ranks(plan: Plan) -> dict[str, str]:
    """The keys of copies and checkpoints, which all ranks share."""
    if not plan.token:
        insecure = {"TASKD_INSECURE": "1"} if plan.insecure else {}
        seal = _secret_of_this_start() if plan.nodes == 1 else ""
        return {"TASKD_SEAL": seal, **insecure}
    from taskd.bus.security import make_checkpoint_key, make_seal

    given = environ.get("TASKD_TOKEN")
    return {
        "TASKD_SEAL": make_seal(plan.token, plan.job),
        **({"TASKD_CHECKPOINT_KEY": make_checkpoint_key(given)} if given else {}),
    }


@cache
def _secret_of_this_start() -> str:
    """For the ranks of a single node: their agent is the only process that has to know it."""
    return token_hex(32)


def _device(plan: Plan, local_rank: int) -> dict[str, str]:
    if not plan.virtual_local_rank:
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else None
    if devices is not None and local_rank >= len(devices):
        raise SettingsError(
            [
                f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible!r} has no device for local "
                f"rank {local_rank}; lower --nproc-per-node or add a device"
            ]
        )
    device = str(local_rank) if devices is None else devices[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
