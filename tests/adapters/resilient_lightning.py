"""Lightning's Trainer with taskd's strategy, with faults at every place of its loops."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from taskd.integrations.lightning import ResilientStrategy
from tests.adapters.ending import await_checkpoint, fault, show

RANK = int(os.environ["RANK"])
STOP = os.environ.get("STOP_EARLY")
MANUAL = int(os.environ.get("MANUAL", "0"))
"""0: Lightning optimizes. Otherwise the number of optimizers of the module."""


class Net(lightning.LightningModule):  # type: ignore[misc]
    """With batch norm, dropout, a metric, and a list that grows during an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.LayerNorm(32) if MANUAL == 2 else torch.nn.BatchNorm1d(32),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(32, 4),
        )
        self.error = MeanSquaredError()
        self.losses: list[torch.Tensor] = []
        self.automatic_optimization = not MANUAL

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(inputs)
        return found

    def training_step(self, batch: list[torch.Tensor], number: int) -> Any:
        fault("forward", RANK, self.trainer.fit_loop.total_batch_idx)
        found = self(batch[0])
        loss = torch.nn.functional.mse_loss(found, batch[1])
        self.error(found, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.losses.append(loss)
        if MANUAL == 1:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if MANUAL == 2:
            for optimizer in self.optimizers():
                with optimizer.toggle_model():
                    part = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
                    optimizer.zero_grad()
                    self.manual_backward(part)
                    fault("toggled", RANK, self.trainer.fit_loop.total_batch_idx)
                    optimizer.step()
        return {"loss": loss, "number": number}

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        fault("prediction", RANK, self.trainer.fit_loop.total_batch_idx)
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("valid_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if MANUAL == 2:
            parts = [self.net[0].parameters(), self.net[3].parameters()]
            return [torch.optim.AdamW(one, lr=1e-2) for one in parts]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(
            lambda *_: fault("optimizer", RANK, self.trainer.fit_loop.total_batch_idx)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        fault("scheduler", RANK, self.trainer.fit_loop.total_batch_idx)
        super().lr_scheduler_step(scheduler, metric)


class Faulty(Callback):  # type: ignore[misc]
    """Counts in an attribute, and fails where the test wants it."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.batches += 1
        if os.environ.get("RAISE_AT") == str(self.batches):
            raise RuntimeError("the callback has failed")
        self.seen("batch", trainer, loss=float(outputs["loss"]) if outputs else 0.0)
        await_checkpoint(trainer.fit_loop.total_batch_idx)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        fault("backward", RANK, trainer.fit_loop.total_batch_idx)

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        fault("zero_grad", RANK, trainer.fit_loop.total_batch_idx)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.seen("validated", trainer, loss=float(metrics["valid_loss"]))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.seen("epoch", trainer)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.seen("save", trainer)

    def seen(self, event: str, trainer: Any, **values: float) -> None:
        number = trainer.fit_loop.total_batch_idx
        line = {"event": event, "batch": number, "count": self.batches, **values}
        with open(f"events-{RANK}", "a") as file:
            file.write(json.dumps(line) + "\n")
        fault(event, RANK, number)


class Later(Callback):  # type: ignore[misc]
    """Comes after EarlyStopping, and fails there."""

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        fault("decided", RANK, trainer.fit_loop.total_batch_idx)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        fault("ended", RANK, trainer.fit_loop.total_batch_idx)


class Saved(ModelCheckpoint):  # type: ignore[misc]
    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        fault("saving", RANK, trainer.fit_loop.total_batch_idx)
        super()._save_checkpoint(trainer, filepath)
        fault("saved", RANK, trainer.fit_loop.total_batch_idx)


class Logger(CSVLogger):  # type: ignore[misc]
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        fault("log", RANK, trainer.fit_loop.total_batch_idx)
        super().log_metrics(metrics, step)
        super().save()
        fault("logged", RANK, trainer.fit_loop.total_batch_idx)


lightning.seed_everything(0)
torch.set_num_threads(1)
net = Net()
inputs = torch.randn(92, 16)
data = TensorDataset(inputs, inputs[:, :4] * 2)
train, valid = torch.utils.data.random_split(data, [80, 12], torch.Generator().manual_seed(0))
best = ModelCheckpoint("best", monitor="valid_loss")
callbacks: list[Callback] = [
    Faulty(),
    LearningRateMonitor(),
    Saved("saved", every_n_train_steps=4, save_top_k=-1, save_last=True),
    best,
]
if STOP:
    callbacks.append(EarlyStopping("valid_loss", patience=1, min_delta=float(STOP)))
callbacks.append(Later())
logger = Logger("logs")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=ResilientStrategy(find_unused_parameters=MANUAL == 2),
    max_epochs=3,
    accumulate_grad_batches=1 if MANUAL else int(os.environ.get("ACCUMULATE", "1")),
    gradient_clip_val=None if MANUAL else 1.0,
    precision=os.environ.get("PRECISION", "32-true"),
    val_check_interval=3,
    log_every_n_steps=2,
    callbacks=callbacks,
    logger=logger,
    enable_model_summary=False,
)
workers = int(os.environ.get("WORKERS", "0"))
if os.environ.get("VALIDATE_FIRST"):
    trainer.validate(net, DataLoader(valid, batch_size=2), verbose=False)
trainer.fit(
    net,
    DataLoader(train, batch_size=4, shuffle=True, num_workers=workers),
    DataLoader(valid, batch_size=2),
    ckpt_path=os.environ.get("RESUME"),
)
show(net)
states = [state for one in trainer.optimizers for state in one.state_dict()["state"].values()]
moments = b"".join(value.numpy().tobytes() for state in states for value in state.values())
end = {
    "optimizer": hashlib.sha256(moments).hexdigest(),
    "scheduler": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
    "gradients": [one.requires_grad for one in net.parameters()],
    "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    "progress": trainer.fit_loop.state_dict(),
    "best": best.best_k_models,
}
Path(f"end-{RANK}.json").write_text(json.dumps(end, sort_keys=True, default=str))
