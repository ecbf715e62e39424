"""The training script of `trainers.py`: one model, in our own loop or in that of a framework.

KIND is loop, transformers or lightning. Every rank writes when it has finished each step; rank 1
kills itself in the forward pass of step KILL_AT, once.
"""

# The environment decides which framework is imported, and each must be imported before its use.

from __future__ import annotations

import os
import signal
from time import monotonic
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.bench.trainers_model import BATCH, LEARNING_RATE, Texts, new_model

KIND, STEPS = os.environ["KIND"], int(os.environ["STEPS"])
RANK = int(os.environ["RANK"])
KILL_AT = int(os.environ.get("KILL_AT", "-1")) if os.environ["TASKD_INCARNATION"] == "0" else -1
passes = 0


def mark(name: str, step: int) -> None:
    with open(f"{name}-{RANK}", "a") as file:
        file.write(f"{step} {monotonic()}\n")


def before_pass(*_: Any) -> None:
    global passes
    if RANK == 1 and passes == KILL_AT:
        mark("killed", passes)
        os.kill(os.getpid(), signal.SIGKILL)
    passes += 1


net = new_model()
net.register_forward_pre_hook(before_pass)


def loop() -> None:
    import taskd.torch as taskd

    job = taskd.init("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    sampler: Any = torch.utils.data.DistributedSampler(Texts(STEPS), 2, RANK)
    loader = DataLoader(Texts(STEPS), batch_size=BATCH, sampler=sampler)
    for step, batch in job.batches(loader, steps=STEPS):
        for attempt in step:
            with attempt:
                model(**batch).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mark("done", int(step))


def transformers_trainer() -> None:
    import transformers

    from taskd.integrations.transformers import Trainer

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            mark("done", state.global_step - 1)

    arguments = transformers.TrainingArguments(
        output_dir="saved",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    Trainer(model=net, args=arguments, train_dataset=Texts(STEPS), callbacks=[Marks()]).train()


def lightning_trainer() -> None:
    import lightning

    from taskd.integrations.lightning import ResilientStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]

    class Marks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            mark("done", trainer.fit_loop.total_batch_idx)

    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ResilientStrategy(),
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[Marks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Texts(STEPS), batch_size=BATCH))


if KIND == "loop":
    loop()
elif KIND == "transformers":
    transformers_trainer()
else:
    lightning_trainer()
