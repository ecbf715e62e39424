"""DeepSpeed's ZeRO-2 in a loop of its own, on generated data.

taskd run --nproc-per-node 2 --preload taskd.integrations.deepspeed \
    examples/frameworks/deepspeed_zero.py
"""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import taskd.torch as taskd
from taskd.integrations.deepspeed import protect

job = taskd.init()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
)
data = TensorDataset(torch.randn(512, 64), torch.randint(8, (512,)))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
protect(job, engine)  # not: job.protect(…)

for step, (inputs, labels) in job.batches(loader, epochs=3):
    for attempt in step:
        with attempt:
            for part, wanted in zip(inputs.split(8), labels.split(8), strict=True):
                outputs = engine(part.to(engine.device, torch.bfloat16))
                engine.backward(
                    nn.functional.cross_entropy(outputs.float(), wanted.to(engine.device))
                )
                engine.step()
    if step % 10 == 9:
        for attempt in job.section("checkpoint"):
            with attempt:
                engine.save_checkpoint("deepspeed_zero", tag=f"step-{step + 1}")
