"""Lightning's Trainer on generated data. Two lines differ from a script without TaskD.

taskd run --nproc-per-node 2 --preload taskd.integrations.lightning \
    examples/frameworks/lightning_trainer.py
"""

import os

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from taskd.integrations.lightning import ResilientStrategy  # the first line


class AutoEncoder(lightning.LightningModule):  # type: ignore[misc]
    """Compresses 64 numbers to 8 and restores them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("valid_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = torch.randn(1024, 64)
trainer = lightning.Trainer(
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy=ResilientStrategy(),  # the second line, instead of: strategy="ddp"
    max_epochs=3,
    logger=CSVLogger("."),
    log_every_n_steps=5,
    enable_progress_bar=False,
)
trainer.fit(
    AutoEncoder(),
    DataLoader(TensorDataset(data[:960]), batch_size=16, shuffle=True),
    DataLoader(TensorDataset(data[960:]), batch_size=16),
)
