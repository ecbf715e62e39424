"""The steps of `trainers.py` while nothing fails: with the adapter and without, in one process.

Two Trainers of FRAMEWORK train one model with one optimizer, because addresses alone change the
speed of a step by some percent. The one with the adapter runs in the main thread, the plain one in
another thread, and they take turns after each step: only one of them runs at any time. In the turns
of the plain one the default process group is one of torch's own.

A step ends when both ranks have finished it. Rank 0 writes the times of all steps to the file
`result`: wall time and processor time of all threads, in seconds.
"""

# The environment decides which framework is imported, and each must be imported before its use.

from __future__ import annotations

import importlib
import json
import os
import threading
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupMember
from torch.utils.data import DataLoader

from tests.bench.plain_group import new_plain_group
from tests.bench.trainers_model import BATCH, LEARNING_RATE, Texts, new_model

FRAMEWORK, PAIRS = os.environ["FRAMEWORK"], int(os.environ["PAIRS"])
RANK = int(os.environ["RANK"])
WARM_UP = 10
STEPS = WARM_UP + PAIRS
KINDS = ("ours", "plain")


class Turns:
    """Lets one of the two threads run, and notes how long each step takes."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self._may_run = {kind: threading.Event() for kind in KINDS}
        self._order = cycle(("ours", "plain", "plain", "ours"))
        self._worlds = {"ours": GroupMember.WORLD, "plain": new_plain_group()}
        self._neutral = new_plain_group()
        self._begun = (0.0, 0.0)

    def begin(self, kind: str) -> None:
        """Before the first step of this kind: `ours` has the first turn."""
        if kind == "plain":
            self._may_run["plain"].wait()
        GroupMember.WORLD = self._worlds[kind]

    def stepped(self, kind: str) -> None:
        """The end of a step. Returns when the next turn of this kind begins."""
        dist.barrier(self._neutral)
        ended = perf_counter(), process_time()
        self.times[kind].append((ended[0] - self._begun[0], ended[1] - self._begun[1]))
        following = next(self._order)
        if following != kind:
            self._may_run[kind].clear()
            self.pass_on(following)
            self._may_run[kind].wait()
            GroupMember.WORLD = self._worlds[kind]
        dist.barrier(self._neutral)
        self._begun = perf_counter(), process_time()

    def pass_on(self, kind: str) -> None:
        self._may_run[kind].set()


def run_transformers(kind: str, turns: Turns) -> None:
    import transformers

    from taskd.integrations.transformers import Trainer as Ours

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.stepped(kind)

    arguments = transformers.TrainingArguments(
        output_dir="saved",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    (Ours if kind == "ours" else transformers.Trainer)(
        model=net,
        args=arguments,
        train_dataset=Texts(STEPS),
        callbacks=[Marks()],
        optimizers=(optimizer, None),
    ).train()


def run_lightning(kind: str, turns: Turns) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from taskd.integrations.lightning import ResilientStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]

    class Marks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            turns.stepped(kind)

    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ResilientStrategy() if kind == "ours" else DDPStrategy(),
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[Marks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Texts(STEPS), batch_size=BATCH))


def run(kind: str, turns: Turns) -> None:
    turns.begin(kind)
    (run_transformers if FRAMEWORK == "transformers" else run_lightning)(kind, turns)


importlib.import_module(f"taskd.integrations.{FRAMEWORK}")
dist.init_process_group("gloo")  # joins the job
net = new_model(layers=1, width=8) if os.environ["SIZE"] == "small" else new_model()
optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
turns = Turns()
other = threading.Thread(target=run, args=("plain", turns))
other.start()
run("ours", turns)
turns.pass_on("plain")
other.join()
if RANK == 0:
    times = {kind: those[WARM_UP:] for kind, those in turns.times.items()}
    Path("result").write_text(json.dumps(times))
