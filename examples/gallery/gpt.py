"""A small GPT in the style of nanoGPT: torch.compile, gradient accumulation, clipping, a schedule.

taskd run --nproc-per-node 2 examples/gallery/gpt.py
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from shared import pace, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd  # +

STEPS, MICRO_BATCHES, BATCH, BLOCK, WIDTH, VOCABULARY = 40, 2, 4, 32, 64, 65


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, targets):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        logits = self.head(self.blocks(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(text: torch.Tensor, step: int, micro: int, rank: int):
    chosen = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    starts = torch.randint(len(text) - BLOCK - 1, (BATCH,), generator=chosen)
    x = torch.stack([text[start : start + BLOCK] for start in starts])
    return x, torch.stack([text[start + 1 : start + BLOCK + 1] for start in starts])


def learning_rate(step: int) -> float:
    warm = min(1.0, (step + 1) / 5)
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(1337)
text = torch.randint(VOCABULARY, (5_000,))
net = GPT()
model = DDP(torch.compile(net)) if job.world_size > 1 else torch.compile(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
job.protect(model=model, optimizer=optimizer, scheduler=scheduler)  # +

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            optimizer.zero_grad(set_to_none=True)
            for micro in range(MICRO_BATCHES):
                last = micro == MICRO_BATCHES - 1 or job.world_size == 1
                with nullcontext() if last else model.no_sync():
                    loss = model(*get_batch(text, step, micro, job.rank)) / MICRO_BATCHES
                    loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: loss {loss.item() * MICRO_BATCHES:.4f}", flush=True)

show(job, net)
