"""A step that is compiled as a whole, under `Model.train`, in one process without a manager."""

from __future__ import annotations

import os

import mindspore as ms
import numpy as np
from mindspore import dataset, nn
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

from taskd.api import init_taskd_worker, start_taskd_worker
from taskd.worker.profiling import profiler

ENOUGH = 10


class UntilRecorded(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def on_train_step_end(self, context: object) -> None:
        self.seen += profiler.of_process().recorder is not None
        if self.seen >= ENOUGH:
            context.request_stop()  # type: ignore[attr-defined]


def main() -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    assert init_taskd_worker(0, 50, "ms")
    assert start_taskd_worker()
    x = np.ones((64, 2), np.float32)
    data = dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(4)
    net = nn.Dense(2, 1)
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), learning_rate=0.01))
    checkpoint = ModelCheckpoint(
        directory=os.getcwd(), config=CheckpointConfig(5, keep_checkpoint_max=1)
    )
    model.train(1000, data, callbacks=[UntilRecorded(), checkpoint], dataset_sink_mode=False)


if __name__ == "__main__":
    main()
