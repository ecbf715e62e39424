"""A data-parallel linear regression on the CPU; all ranks average their gradients.

`msrun` also runs this script as its scheduler, which stays in `init()`. Rank 0 saves a checkpoint
of every step, from which all ranks continue, and each rank writes its steps to `steps-<rank>.txt`.
With DIE=<rank>.<step> that rank kills itself at that step, once; with HOLD=<rank>.<step> it prints
"held" and blocks, once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

STEPS = 6
TRUTH = np.array([[2.0], [-3.0]], dtype=np.float32)


def main(folder: Path) -> None:
    ms.set_device("CPU")
    init()
    rank, size = get_rank(), get_group_size()
    add = ops.AllReduce()
    net = nn.Dense(2, 1, weight_init="zeros", bias_init="zeros")
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
    loss_of = nn.MSELoss()
    gradients = ms.value_and_grad(lambda x, y: loss_of(net(x), y), None, optimizer.parameters)
    saved = folder / "model.npz"
    for step in range(load(net, saved), STEPS):
        if os.environ.get("DIE") == f"{rank}.{step}" and once(folder / "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("HOLD") == f"{rank}.{step}" and once(folder / "held"):
            print("\nheld", flush=True)  # noqa: T201 - MindSpore prints lines without a newline
            signal.pause()
        x = np.random.default_rng(step * size + rank).normal(size=(8, 2)).astype(np.float32)
        loss, grads = gradients(ms.Tensor(x), ms.Tensor(x @ TRUTH))
        optimizer(tuple(add(grad) / size for grad in grads))
        if rank == 0:
            save(net, saved, step + 1)
        with (folder / f"steps-{rank}.txt").open("a") as done:
            done.write(f"{step} {float(loss.asnumpy()):.6f} {net.weight.asnumpy().tolist()}\n")


def load(net: nn.Cell, saved: Path) -> int:
    """Load the checkpoint; returns the step to continue with."""
    if not saved.exists():
        return 0
    with np.load(saved) as checkpoint:
        for parameter in net.trainable_params():
            parameter.set_data(ms.Tensor(checkpoint[parameter.name]))
        return int(checkpoint["step"])


def save(net: nn.Cell, saved: Path, step: int) -> None:
    fresh = saved.with_name("fresh.npz")
    np.savez(fresh, step=step, **{p.name: p.asnumpy() for p in net.trainable_params()})
    fresh.replace(saved)


def once(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
