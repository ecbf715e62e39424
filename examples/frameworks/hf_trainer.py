"""transformers' Trainer on generated data. One import differs from a script without TaskD.

taskd run --nproc-per-node 2 --preload taskd.integrations.transformers \
    examples/frameworks/hf_trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from taskd.integrations.transformers import Trainer  # instead of: from transformers import Trainer

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=32))
texts = [torch.randint(256, (32,)) for _ in range(512)]
data = [{"input_ids": text, "labels": text} for text in texts]

arguments = TrainingArguments(
    output_dir="hf_trainer",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=arguments, train_dataset=data[:448], eval_dataset=data[448:])
trainer.train()
