"""The Trainer of transformers without changes, with its own checkpoints."""

import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.adapters.ending import die, show


class KillAtStep(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die(int(os.environ["RANK"]), state.global_step)


torch.manual_seed(0)
net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
texts = [torch.randint(64, (12,)) for _ in range(256)]
arguments = TrainingArguments(
    output_dir="saved",
    max_steps=20,
    per_device_train_batch_size=4,
    save_steps=5,
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    disable_tqdm=True,
)
data = [{"input_ids": text, "labels": text} for text in texts]
trainer = Trainer(model=net, args=arguments, train_dataset=data, callbacks=[KillAtStep()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("saved"))
show(net)
