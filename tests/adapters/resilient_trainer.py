"""taskd's Trainer for transformers, with faults at every place of its loop."""

import json
import os
from pathlib import Path
from typing import Any

import torch

import tests.adapters.accelerate_on_cpu  # noqa: F401 - before a Trainer is created

# isort: split
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from taskd.integrations.transformers import Seq2SeqTrainer, Trainer, TrainerMixin
from tests.adapters.ending import await_checkpoint, digest, fault, show

RANK = int(os.environ["RANK"])
STOP = os.environ.get("STOP_EARLY")
SEQ2SEQ = os.environ.get("SEQ2SEQ") == "1"
SFT = os.environ.get("SFT") == "1"
FSDP = os.environ.get("FSDP")

if SFT:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Base(TrainerMixin, SFTTrainer):  # type: ignore[misc]
        protected_attributes = ("losses", "_metrics", "_total_train_tokens")
else:

    class Base(Seq2SeqTrainer if SEQ2SEQ else Trainer):  # type: ignore[misc, no-redef]
        protected_attributes = ("losses",)


class Faulty(TrainerCallback):  # type: ignore[misc]
    """Counts in an attribute, opens a file when training begins, and fails where it should."""

    def __init__(self) -> None:
        self.steps = self.epochs = 0
        self.file: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.file = Path(f"events-{RANK}").open("a")  # noqa: SIM115 - closed with the process

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if os.environ.get("RAISE_AT") == str(self.steps):
            raise RuntimeError("the callback has failed")
        self.seen("step", state)
        await_checkpoint(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.seen("log", state, **{name: logs[name] for name in ("loss",) if name in logs})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.seen("evaluate", state, loss=metrics["eval_loss"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen("save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen("epoch", state, epochs=self.epochs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("substep", RANK, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("backward", RANK, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("optimizer", RANK, state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fault("prediction", RANK, state.global_step)

    def seen(self, event: str, state: Any, **values: float) -> None:
        if self.file is None:
            return  # before the training
        line = {"event": event, "step": state.global_step, "count": self.steps, **values}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        fault(event, RANK, state.global_step)


class Faults(Base):
    """More places to fail at, and what a subclass may keep from step to step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: dict[str, list[float]] = {"train": [], "eval": []}
        super().__init__(*args, **kwargs)

    def _get_learning_rate(self) -> Any:
        fault("scheduler", RANK, self.state.global_step)
        return super()._get_learning_rate()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        fault("forward", RANK, self.state.global_step)
        found = super().compute_loss(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        self.losses["train" if self.model.training else "eval"].append(loss.item())
        return found

    def _save_scaler(self, output_dir: str) -> None:
        fault("saving", RANK, self.state.global_step)
        super()._save_scaler(output_dir)


torch.manual_seed(0)
torch.set_num_threads(1)
if SEQ2SEQ:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    net = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))
else:
    net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
texts = [torch.randint(64, (12,)) for _ in range(92)]
data = [{"input_ids": text, "labels": text} for text in texts]
more: dict[str, Any] = {}
Arguments = Seq2SeqTrainingArguments if SEQ2SEQ else TrainingArguments
if SFT:
    words = {f"word{number}": number for number in range(62)} | {"[pad]": 62, "[end]": 63}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "word0")),
        pad_token="[pad]",
        eos_token="[end]",
    )
    Arguments, more = SFTConfig, {"processing_class": tokenizer}
    sets = [
        Dataset.from_list([{"input_ids": text.tolist()} for text in part])
        for part in (texts[:80], texts[80:])
    ]
else:
    sets = [data[:80], data[80:]]
arguments = Arguments(
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
    eval_on_start=os.environ.get("EVAL_ON_START") == "1",
    save_steps=4,
    load_best_model_at_end=bool(STOP),
    metric_for_best_model="eval_loss" if STOP else None,
    bf16=os.environ.get("BF16") == "1",
    fp16=os.environ.get("FP16") == "1",
    **({"fsdp": True, "fsdp_config": json.loads(FSDP)} if FSDP else {}),
    **({"predict_with_generate": True, "generation_max_length": 6} if SEQ2SEQ else {}),
    **({"max_length": 12} if SFT else {}),
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
)
callbacks: list[Any] = [Faulty()]
if STOP:
    callbacks.append(EarlyStoppingCallback(2, early_stopping_threshold=float(STOP)))
trainer = Faults(
    model=net,
    args=arguments,
    train_dataset=sets[0],
    eval_dataset=sets[1],
    callbacks=callbacks,
    **more,
)
if SEQ2SEQ:
    trainer.evaluate()  # as scripts do that want to know where they begin
    trainer.losses["eval"].clear()
trainer.train(
    resume_from_checkpoint=get_last_checkpoint("saved") if Path("saved").exists() else None
)
show(net)
log = [
    {
        name: value
        for name, value in entry.items()
        if not name.endswith(("runtime", "per_second", "preparation_time"))
    }
    for entry in trainer.state.log_history
]
optimizer = trainer.optimizer.state_dict()["state"]
end = {
    "log": log,
    "best": trainer.state.best_metric,
    "losses": trainer.losses,
    "operations": trainer.state.total_flos,
    "optimizer": digest(v for one in optimizer.values() for v in one.values()),
    "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
}
times = [
    {name: value for name, value in entry.items() if name.endswith("runtime")}
    for entry in trainer.state.log_history
    if "eval_runtime" in entry
]
Path(f"times-{RANK}.json").write_text(json.dumps(times))
Path(f"end-{RANK}.json").write_text(json.dumps(end, sort_keys=True, default=str))
