"""Lightning's Trainer without changes, with its own checkpoints."""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.ending import die, show


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        die(self.global_rank, self.global_step)


lightning.seed_everything(0)
net = Net()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=3,
    callbacks=[ModelCheckpoint(dirpath="saved", save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
last = "saved/last.ckpt" if os.path.exists("saved/last.ckpt") else None
trainer.fit(net, DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=8), ckpt_path=last)
show(net)
