"""torchtitan's Trainer with FSDP2 on generated text. The import of Trainer is all that differs.

taskd run --nproc-per-node 2 --preload taskd.integrations.torchtitan \
    examples/frameworks/titan_trainer.py
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from datasets import Dataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger

from taskd.integrations.torchtitan import Trainer  # not: from torchtitan.trainer import Trainer


class Bytes(BaseTokenizer):  # type: ignore[misc]
    """One token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def texts(seed: str) -> Dataset:
    chance = Random(seed)
    return Dataset.from_list([{"text": chance.randbytes(30).hex()} for _ in range(200)])


DATASETS["generated"] = DatasetConfig(
    path="train", loader=texts, sample_processor=lambda sample: sample["text"]
)
spec = model_registry("debugmodel")
spec.model.layers = spec.model.layers[:2]
for layer in spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()

config = Trainer.Config(
    model_spec=spec,
    tokenizer=Bytes.Config(),
    dataloader=HuggingFaceTextDataLoader.Config(dataset="generated"),
    loss=CrossEntropyLoss.Config(global_vocab_size=2048),
    optimizer=default_adamw(lr=8e-4),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.8),
    training=TrainingConfig(
        steps=40,
        local_batch_size=2,
        global_batch_size=8,
        seq_len=32,
        disable_cuda_graphs=True,
    ),
    parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    checkpoint=CheckpointManager.Config(enable=True, interval=10, last_save_model_only=False),
    validator=Validator.Config(
        enable=True,
        freq=8,
        steps=2,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="generated", dataset_path="validation"),
    ),
    debug=DebugConfig(seed=0),
    metrics=MetricsProcessor.Config(log_freq=5),
)

if __name__ == "__main__":
    init_logger()
    trainer = config.build()
    trainer.train()
    trainer.close()
