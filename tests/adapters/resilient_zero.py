"""DeepSpeed's ZeRO-1 or ZeRO-2, with faults at every place of the loop."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import taskd.torch as taskd
from taskd.integrations.deepspeed import protect
from tests.adapters.ending import fault

OPTIONS = json.loads(os.environ.get("ZERO_OPTIONS", "{}"))
DTYPE = torch.bfloat16 if OPTIONS.get("bf16") else torch.float32

torch.set_num_threads(1)
job = taskd.init("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.1), nn.GELU(), nn.Linear(33, 5))
data = TensorDataset(torch.randn(160, 16), torch.randint(5, (160,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
decayed = [one for one in net.parameters() if one.ndim > 1]
others = [one for one in net.parameters() if one.ndim == 1]
groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, 1e-2)
config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": OPTIONS.get("stage", 2), "reduce_bucket_size": 300},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "steps_per_print": 1000,
}
if DTYPE is torch.bfloat16:
    config["bf16"] = {"enabled": True}
engine, zero, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
protect(job, engine)


def fault_in(owner: Any, name: str, place: str) -> None:
    plain = getattr(owner, name)

    def before(*args: Any, **kwargs: Any) -> Any:
        fault(place, job.rank, job.step)
        return plain(*args, **kwargs)

    setattr(owner, name, before)


fault_in(net[0], "forward", "forward")
fault_in(zero, "reduce_ipg_grads", "backward")
fault_in(zero, "unscale_and_clip_grads", "clip")
fault_in(zero, "_update_model_bit16_weights", "updated")
fault_in(engine, "_save_zero_checkpoint", "saving")


def train(inputs: torch.Tensor, labels: torch.Tensor) -> float:
    total = 0.0
    for part, wanted in zip(torch.split(inputs, 4), torch.split(labels, 4), strict=True):
        loss = nn.functional.cross_entropy(engine(part.to(DTYPE)).float(), wanted)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    fault("end", job.rank, job.step)
    return total


lines = Path(f"log-{job.rank}").open("a")  # noqa: SIM115 - closed with the process
for step, (inputs, labels) in job.batches(loader, epochs=2):
    fault("before", job.rank, step)
    loss = step.run(train, inputs, labels)
    line = {"step": step, "loss": loss, "lr": engine.get_lr(), "scale": zero.loss_scale}
    lines.write(json.dumps({**line, "norm": float(engine.get_global_grad_norm() or 0)}) + "\n")
    lines.flush()
    fault("after", job.rank, step)
    if step % 6 == 5:
        for attempt in job.section("checkpoint"):
            with attempt:
                engine.save_checkpoint("saved", tag=f"step-{step + 1}")

tensors = [*net.parameters(), *zero.single_partition_of_fp32_groups]
for state in zero.optimizer.state.values():
    tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
raw = b"".join(
    one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors
)
end = {
    "state": hashlib.sha256(raw).hexdigest(),
    "count": len(tensors),
    "counters": [
        engine.global_steps,
        engine.global_samples,
        engine.micro_steps,
        engine.skipped_steps,
    ],
    "scheduler": engine.lr_scheduler.state_dict(),
}
Path(f"end-{job.rank}.json").write_text(json.dumps(end, sort_keys=True))
