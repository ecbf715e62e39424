"""The model and the data of the benchmarks of Trainers."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH, WORDS = 8, 64, 512
LEARNING_RATE = 1e-3


class Texts(Dataset[dict[str, torch.Tensor]]):
    """As many as two ranks need for so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return 2 * BATCH * self._steps

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        text = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": text, "labels": text}


def new_model(layers: int = 4, width: int = 128) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"n_layer": layers, "n_head": 4, "n_embd": width}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=WORDS, n_positions=LENGTH))
