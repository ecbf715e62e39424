"""The cost of verified gradients: the same DDP step with and without a check.

One run with a check in every fifth step. What a step with a check takes longer than its neighbours
is spread over the 50 steps of the interval that the documentation recommends.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.bench.rows import Row
from tests.bench.torch_step import estimate, run_script

WORLD, WIDTH, DEPTH, BATCH = 3, 1024, 4, 128
EVERY, USUAL = 5, 50
STEPS, WARM_UP = 300, 10
NOTES = """
A check costs one more forward and backward pass. The ranks of this benchmark share two cores; on
devices of their own they check each other at the same time.
"""


def measure() -> list[Row]:
    took = run_script(verified, WORLD)["took"]
    extra = []
    for at in range(WARM_UP + EVERY - WARM_UP % EVERY, len(took) - EVERY, EVERY):
        plain = median(took[at + 1 : at + EVERY])
        extra.append((took[at] - plain) / plain)
    found = estimate([one / USUAL for one in extra])
    return [
        Row(
            f"a DDP step of {DEPTH * WIDTH * WIDTH / 1e6:.0f}M parameters on {WORLD} ranks with "
            f"verify_every={USUAL}, or without",
            f"{found.middle:+.2%} (95 %: {found.low:.2%} to {found.high:.2%}; {found.size} checks)",
            f"{median(took) * 1e3:.1f} ms",
            1 + found.middle,
            target=1.03,
        )
    ]


# Inside a rank


def verified(args: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    job = taskd.init()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    job.protect(model=model, optimizer=optimizer, verify_every=EVERY)
    batch = torch.randn(BATCH, WIDTH)

    def forward_backward(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    took = []
    for step in job.steps(STEPS):
        began = perf_counter()
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                step.verified(forward_backward, batch)
                optimizer.step()
        took.append(perf_counter() - began)
    if job.rank == 0:
        (Path(args["folder"]) / "result").write_text(json.dumps({"took": took}))
