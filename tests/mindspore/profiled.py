"""The documented worker in a MindSpore script in PyNative mode, with all parts of a step.

With PROFILED=1 each rank trains until it is recorded, resets its weights, and trains a fixed number
of steps; the final weights must equal those of a job without profiling.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import dataset, mint, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from taskd.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker
from taskd.worker.profiling import profiler

STEPS = 12
WANTED = os.environ.get("PROFILED", "")


def main(folder: Path) -> None:
    ms.set_device("CPU")
    init()
    rank, size = get_rank(), get_group_size()
    assert init_taskd_worker(rank, 50, "ms")
    assert start_taskd_worker()
    add = ops.AllReduce()
    plain = {"weight_init": "ones", "bias_init": "zeros"}
    net = nn.SequentialCell(nn.Dense(2, 4, **plain), nn.Dense(4, 1, **plain))
    first = [parameter.asnumpy().copy() for parameter in net.trainable_params()]
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.01)
    loss_of = nn.MSELoss()
    gradients = ms.value_and_grad(lambda x, y: loss_of(net(x), y), None, optimizer.parameters)
    x = np.random.default_rng(rank).normal(size=(64, 2)).astype(np.float32)
    data = dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(4)

    def train(steps: int) -> None:
        for batch, truth in data.create_tuple_iterator(num_epochs=1):
            if not (steps := steps - 1) + 1:
                break
            _, grads = gradients(batch, truth)
            optimizer(tuple(add(grad) / size for grad in grads))

    ready = ms.Tensor([0.0], ms.float32)
    while float(ready.asnumpy()[0]) < size:
        train(3)
        ready = ms.Tensor([float(not WANTED or profiler.of_process().recorded == 31)], ms.float32)
        mint.distributed.all_reduce(ready)
    for parameter, value in zip(net.trainable_params(), first, strict=True):
        ops.assign(parameter, ms.Tensor(value))
    train(STEPS)
    ms.save_checkpoint(net, str(folder / f"model-{rank}.ckpt"))
    assert not np.array_equal(net.trainable_params()[0].asnumpy(), first[0]), (
        "training changed the weights"
    )
    weights = [parameter.asnumpy().tolist() for parameter in net.trainable_params()]
    (folder / f"steps-{rank}.txt").write_text(f"{STEPS} 0 {weights}\n")
    assert destroy_taskd_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
