"""taskd's Trainer for transformers, with faults at every place of its loop."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from taskd.integrations.transformers import Trainer
from tests.adapters.ending import fault, show

RANK = int(os.environ["RANK"])
STOP = os.environ.get("STOP_EARLY")


class Faulty(TrainerCallback):  # type: ignore[misc]
    """Counts in an attribute, opens a file when training begins, and fails where it should."""

    def __init__(self) -> None:
        self.steps = 0
        self.file: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.file = Path(f"events-{RANK}").open("a")  # noqa: SIM115 - closed with the process

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if os.environ.get("RAISE_AT") == str(self.steps):
            raise RuntimeError("the callback has failed")
        self.seen("step", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.seen("log", state, **{name: logs[name] for name in ("loss",) if name in logs})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.seen("evaluate", state, loss=metrics["eval_loss"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen("save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen("epoch", state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("substep", RANK, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("backward", RANK, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("optimizer", RANK, state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("prediction", RANK, state.global_step)

    def seen(self, event: str, state: Any, **values: float) -> None:
        line = {"event": event, "step": state.global_step, "count": self.steps, **values}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        fault(event, RANK, state.global_step)


class Faults(Trainer):
    """More places to fail at."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        fault("forward", RANK, self.state.global_step)
        return super().compute_loss(*args, **kwargs)

    def _save_scaler(self, output_dir: str) -> None:
        fault("saving", RANK, self.state.global_step)
        super()._save_scaler(output_dir)


torch.manual_seed(0)
torch.set_num_threads(1)
net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
texts = [torch.randint(64, (12,)) for _ in range(92)]
data = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    output_dir="saved",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    logging_steps=3,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    load_best_model_at_end=bool(STOP),
    metric_for_best_model="eval_loss" if STOP else None,
    bf16=os.environ.get("BF16") == "1",
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
)
callbacks: list[Any] = [Faulty()]
if STOP:
    callbacks.append(EarlyStoppingCallback(2, early_stopping_threshold=float(STOP)))
trainer = Faults(
    model=net, args=arguments, train_dataset=data[:80], eval_dataset=data[80:], callbacks=callbacks
)
trainer.train(
    resume_from_checkpoint=get_last_checkpoint("saved") if Path("saved").exists() else None
)
show(net)
log = [
    {
        name: value
        for name, value in entry.items()
        if "runtime" not in name and "per_second" not in name
    }
    for entry in trainer.state.log_history
]
optimizer = trainer.optimizer.state_dict()["state"]
moments = b"".join(v.numpy().tobytes() for one in optimizer.values() for v in one.values())
end = {
    "log": log,
    "best": trainer.state.best_metric,
    "operations": trainer.state.total_flos,
    "optimizer": hashlib.sha256(moments).hexdigest(),
    "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
}
Path(f"end-{RANK}.json").write_text(json.dumps(end, sort_keys=True, default=str))
