"""Trains on one device that all ranks share, with the fault of FAULT: rank, step, kind.

NCCL refuses two ranks on one device unless they seem to be on two hosts, so each has a host id.
"""

import hashlib
import os
import signal
import socket
import sys
import threading
from typing import Any

kind, backend, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, first_incarnation = int(os.environ["RANK"]), os.environ.get("TASKD_INCARNATION", "0") == "0"
os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.distributed_c10d import _coalescing_manager  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import taskd.torch as taskd  # noqa: E402

WIDTH = 256
fault_rank, fault_step, fault = os.environ.get("FAULT", "-1 -1 none").split(" ", 2)


def connections() -> dict[Any, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                found[(one.getsockname(), one.getpeername())] = int(name)
        except OSError:
            continue  # not a connection
    return found


def is_fault_due() -> bool:
    return first_incarnation and (rank, job.step) == (int(fault_rank), int(fault_step))


def lose_rank_or_connections() -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for (mine, peer), number in connections().items():
        if (mine, peer) not in before and not {mine[1], peer[1]} & stores:
            with socket.socket(fileno=os.dup(number)) as one:
                one.shutdown(socket.SHUT_RDWR)


class Hiccup(Exception):
    """Listed in `retry_on`."""


def raise_hiccup() -> None:
    """In the middle of coalesced operations."""
    global fault
    if fault == "raises" and is_fault_due():
        fault = "done"
        raise Hiccup


def exchange(sent: torch.Tensor) -> torch.Tensor:
    """Exchange a value by every operation of NCCL; the result is 1 if everything arrives."""
    peer, world = 1 - rank, dist.get_world_size()
    received, gathered, part = torch.empty_like(sent), sent.new_empty(world), torch.empty_like(sent)
    to, from_ = dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)
    for work in dist.batch_isend_irecv([to, from_]):
        work.wait()
    dist.all_gather_into_tensor(gathered, sent)
    dist.reduce_scatter_tensor(part, gathered)
    swapped = torch.empty_like(gathered)
    dist.all_to_all_single(swapped, gathered)
    dist.broadcast(swapped, src=0)
    sums = [sent.clone(), sent.clone()]
    with _coalescing_manager(device=sent.device, async_ops=True) as both:
        for one in sums:
            dist.all_reduce(one)
            raise_hiccup()
    both.wait()
    return received * part * swapped.prod() * sums[0] * sums[1] / world**3


device = "cuda" if torch.cuda.is_available() else "cpu"
splits = kind in ("split", "mesh")
own_device = torch.device(device, 0) if splits else None
job = taskd.init(backend=backend, device_id=own_device)
before = connections()
stores = {int(os.environ["MASTER_PORT"]), int(os.environ["TASKD_STORE"].rpartition(":")[2])}
torch.manual_seed(0)
if kind == "exchange":
    # A set-up with collectives: a replacement gets the results of its predecessor.
    agreed = exchange(torch.ones(1, device=device))
    assert agreed.item() == 1, agreed
parts = [
    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)).to(device) for _ in range(4)
]
net = nn.Sequential(*parts)
if kind == "fsdp":
    for part in (*parts, net):
        fully_shard(part)
model = net if kind == "fsdp" else DistributedDataParallel(net)
half: Any = dist.new_group([0, 1]) if kind == "subgroups" else None
if kind == "split":
    half = dist.split_group(split_ranks=[[0, 1]])
    dist.new_group([0])  # another group, on one of the two ranks
if kind == "mesh":
    half = init_device_mesh(device, (1, 2), mesh_dim_names=("row", "column")).get_group("column")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
job.protect(model=model, optimizer=optimizer, retry_on=(Hiccup,))

pause = threading.Event()
for step in job.steps(steps):
    with step:
        pause.wait(float(os.environ.get("STEP_S", "0")))  # a step of a larger model
        batch = torch.randn(64, WIDTH, device=device)
        now = is_fault_due()
        loss = (model(batch) - batch).square().mean()
        if half is not None and rank < 2:
            scale = torch.ones(1, device=device)
            dist.all_reduce(scale, group=half)
            loss = loss * scale / 2
        if kind == "exchange":
            loss = loss * exchange(torch.ones(1, device=device))
        if now and fault in ("killed", "cut off"):
            lose_rank_or_connections()
            fault = "done"
            first_incarnation = False
        loss.backward()
        optimizer.step()
        if kind == "reading":
            loss.item()  # waits for the device inside the step
        optimizer.zero_grad()

digest = hashlib.sha256()
for name, tensor in model.state_dict().items():
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    digest.update(name.encode() + whole.cpu().numpy().tobytes())
if rank == 0:
    sys.stdout.write(f"weights {digest.hexdigest()[:16]}\n")
