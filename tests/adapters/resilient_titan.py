"""taskd's Trainer for torchtitan, with faults at every place of its loop."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

import tests.adapters.titan_on_cpu  # noqa: F401 - before torchtitan

# isort: split
from examples.frameworks.titan_trainer import Bytes
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from taskd.integrations.torchtitan import Trainer
from tests.adapters.ending import fault

RANK = int(os.environ["RANK"])
OPTIONS = json.loads(os.environ.get("TITAN_OPTIONS", "{}"))


class Faults(Trainer):
    """Fails where it should."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fault_in(self.model_parts[0].layers["0"], "forward", "forward")
        self.fault_in(self.checkpointer, "maybe_wait_for_staging", "backward")
        self.fault_in(self.optimizers, "step", "optimizer")
        self.fault_in(self.lr_schedulers, "step", "updated")
        self.fault_in(self.checkpointer, "dcp_save", "saving")
        self.fault_in(self.checkpointer, "_purge_stale_checkpoints", "saved")
        self.fault_in(self.validator, "post_dataloading_process", "validating")

    def fault_in(self, owner: Any, name: str, place: str) -> None:
        plain = getattr(owner, name)

        def before(*args: Any, **kwargs: Any) -> Any:
            fault(place, RANK, self.step)
            return plain(*args, **kwargs)

        setattr(owner, name, before)

    def train_step(self, data_iterator: Any) -> None:
        fault("before", RANK, self.step)
        super().train_step(data_iterator)
        fault("after", RANK, self.step)


class Lines:
    """A logger that writes one line per event."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        kept = {
            name: value
            for name, value in metrics.items()
            if "loss" in name or name.startswith(("lr", "grad", "n_tokens"))
        }
        with Path(f"log-{RANK}").open("a") as file:
            file.write(json.dumps({"step": step, **kept}, sort_keys=True) + "\n")

    def close(self) -> None:
        pass


spec = model_registry("debugmodel")
spec.model.layers = spec.model.layers[: OPTIONS.get("layers", 1)]
for layer in spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()

config = Faults.Config(
    model_spec=spec,
    tokenizer=Bytes.Config(),
    dataloader=HuggingFaceTextDataLoader.Config(
        dataset="generated", num_workers=OPTIONS.get("workers", 0)
    ),
    loss=CrossEntropyLoss.Config(global_vocab_size=2048),
    optimizer=default_adamw(lr=8e-4),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, decay_ratio=0.8),
    training=TrainingConfig(
        steps=OPTIONS.get("steps", 14),
        local_batch_size=2,
        global_batch_size=OPTIONS.get("batch", 8),
        seq_len=16,
        disable_cuda_graphs=True,
    ),
    parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **OPTIONS.get("parallelism", {})),
    checkpoint=CheckpointManager.Config(
        enable=True, interval=4, last_save_model_only=False, keep_latest_k=0
    ),
    validator=Validator.Config(
        enable=True,
        freq=5,
        steps=2,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="generated", dataset_path="validation"),
    ),
    debug=DebugConfig(seed=0),
    metrics=MetricsProcessor.Config(log_freq=3),
)
torch.set_num_threads(1)
trainer = Faults(config)
trainer.metrics_processor.logger = Lines()
trainer.fault_in(trainer.metrics_processor.logger, "log", "log")
trainer.train()

tensors = [one for part in trainer.model_parts for one in part.parameters()]
for optimizer in trainer.optimizers:
    for one in optimizer.state.values():
        tensors += [one["exp_avg"], one["exp_avg_sq"], one["step"]]
own = [getattr(one, "_local_tensor", one).detach() for one in tensors]
end = {
    "state": hashlib.sha256(b"".join(one.numpy().tobytes() for one in own)).hexdigest(),
    "trainer": trainer.state_dict(),
    "data": hashlib.sha256(repr(trainer.dataloader.state_dict()).encode()).hexdigest(),
    "scheduler": trainer.lr_schedulers.state_dict(),
}
Path(f"end-{RANK}.json").write_text(json.dumps(end, sort_keys=True))
trainer.close()
