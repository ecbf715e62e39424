"""The state of a Lightning Trainer, as parts that a job can protect.

The counters of its loops are the same on all ranks. What a rank has logged in this epoch, its
metrics, and the attributes of the module and the callbacks may belong to that rank alone.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from taskd.errors import SettingsError
from taskd.integrations.packed_values import (
    GrowingList,
    NotLiteral,
    is_plain,
    literal,
    packed,
    read_literal,
    unpacked,
)

CONNECTOR = (
    "_progress_bar_metrics",
    "_logged_metrics",
    "_callback_metrics",
    "_first_loop_iter",
    "_current_fx",
)
"""Attributes of Lightning's logger connector."""


class PositionPart:
    """The position in all loops. It follows from the number of the step, and changes after the
    optimizer's update."""

    follows_from_step = True

    def __init__(self, trainer: Any) -> None:
        self._loop = trainer.fit_loop
        self._counters = list(_counters(trainer.fit_loop))
        self.has_begun = False
        """A batch of this training has begun: Lightning is inside of an epoch from then on."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "has_begun": self.has_begun,
            "progress": [values[name] for values, name in self._counters],
            "stepped": self._loop.epoch_loop._batches_that_stepped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.has_begun = state["has_begun"]
        for (values, name), value in zip(self._counters, state["progress"], strict=True):
            values[name] = value
        self._loop.epoch_loop._batches_that_stepped = state["stepped"]


class SwitchPart:
    """What callbacks and validations decide for the trainer.

    Nothing in it changes after the optimizer's update: what a lost rank has made of it then would
    not be known (`core/worker/state_evidence.py`).
    """

    def __init__(self, trainer: Any, total: int) -> None:
        """`total`: the number of batches of the training, if nothing ends it early."""
        self._trainer, self.total = trainer, total

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "total": self.total,
            "evaluated": trainer.fit_loop.epoch_loop.val_loop._has_run,
            "should_stop": trainer.should_stop,
            "accumulated": trainer.accumulate_grad_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self.total = state["total"]
        trainer.fit_loop.epoch_loop.val_loop._has_run = state["evaluated"]
        trainer.should_stop = state["should_stop"]
        trainer.accumulate_grad_batches = state["accumulated"]


def _counters(owner: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The counters of a loop and of the loops inside it, and how they go on after a checkpoint.

    Each as the attributes of its owner, and its name there.
    """
    for name, value in vars(owner).items():
        if isinstance(value, _Loop | _BaseProgress):
            yield from _counters(value)
        elif isinstance(owner, _BaseProgress) or name in RESUMED:
            yield vars(owner), name


RESUMED = (
    "_restarting",
    "_loaded_from_state_dict",
    "_resuming_from_checkpoint",
    "_skip_next_val",
    "_restart_stage",
)
"""Attributes of Lightning's loops: the first batch after a checkpoint is special to them."""


class ResultsPart:
    """What was logged since the epoch began, and the output of the last training step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.output: dict[str, Any] = {}
        self.lines: list[Line] = []
        """What the attempt has given to the loggers: they get it when the step is committed."""

    @property
    def _results(self) -> _ResultCollection:
        return self._trainer.fit_loop.epoch_loop._results

    def state_dict(self) -> str | dict[str, Any]:
        """As a text, unless a tensor in it is large or on a device."""
        connector = self._trainer._logger_connector
        state = {
            "results": {key: _saved_metric(one) for key, one in self._results.items()},
            "connector": {name: getattr(connector, name) for name in CONNECTOR},
            "output": {name: v for name, v in self.output.items() if is_plain(v)},
            "lines": [one for one in self.lines if is_plain(one)],
        }
        try:
            return literal(state)
        except NotLiteral:
            return packed(state)  # type: ignore[no-any-return]

    def load_state_dict(self, packed_state: str | dict[str, Any]) -> None:
        if isinstance(packed_state, str):
            state = read_literal(packed_state)
        else:
            state = unpacked(packed_state)
        results, known = self._results, dict(self._results)
        results.clear()
        for key, (meta, sync, values) in state["results"].items():
            metric = known.get(key)
            if metric is None:
                metric = self._metric(meta, sync, is_tensor=values is not None)
            for name, value in (values or {}).items():
                setattr(metric, name, value)
            results[key] = metric
        for name, value in state["connector"].items():
            setattr(self._trainer._logger_connector, name, value)
        self.output, self.lines = state["output"], state["lines"]

    def _metric(self, fields: dict[str, Any], sync: dict[str, Any], is_tensor: bool) -> Any:
        meta = _Metadata(**fields)
        meta.sync = _Sync(fn=self._trainer.strategy.reduce, **sync)
        metric = _ResultMetric(meta, is_tensor)
        if not is_tensor:
            owner = self._trainer.lightning_module
            metric.value = owner.get_submodule(meta.metric_attribute)
            metric._forward_cache = metric.value._forward_cache
        return metric.to(self._trainer.strategy.root_device)


Line = tuple[int, dict[str, Any], int | None]
"""The number of a logger, and the arguments of its `log_metrics`."""
RESULT = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "has_reset")


def _saved_metric(metric: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """The options of a logged value, and the value; None: a metric of the module has it."""
    meta = metric.meta
    fields = dict(vars(meta))
    sync = fields.pop("_sync")
    if sync.group is not None:
        raise SettingsError(
            [f"self.log({meta.name!r}, sync_dist_group=…): the group could not be given away"]
        )
    fields["reduce_fx"] = meta.reduce_fx.__name__
    how = {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op}
    if not metric.is_tensor:
        return fields, how, None
    names = [name for name in RESULT if hasattr(metric, name)]
    values = {name: getattr(metric, name) for name in names}
    return fields, how, values | {"_update_count": metric._update_count}


class MetricsPart:
    """The states of the torchmetrics in the module, which its own state does not contain."""

    def __init__(self, module: LightningModule) -> None:
        self._metrics = {
            name: one
            for name, one in module.named_modules()
            if isinstance(one, Metric) and not isinstance(one, _ResultMetric)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {key: packed(getattr(one, key)) for key in (*one._defaults, *METRIC)}
            for name, one in self._metrics.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state.items():
            for key, value in values.items():
                setattr(self._metrics[name], key, unpacked(value))


METRIC = ("_computed", "_forward_cache", "_update_count")


class AttributesPart:
    """Numbers, strings, tensors, and lists and dictionaries of them: attributes of objects."""

    def __init__(self, owners: Iterable[Any], base: Any) -> None:
        """`base`: an object whose attributes are those of the framework."""
        self._owners = list(owners)
        self._left_out = set(vars(base))
        self._lists: dict[tuple[int, str], GrowingList] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            str(number): dict(self._values(number, owner)) | _own_state(owner)
            for number, owner in enumerate(self._owners)
        }

    def _values(self, number: int, owner: Any) -> Iterator[tuple[str, Any]]:
        for name, value in vars(owner).items():
            if name in self._left_out:
                continue
            if isinstance(value, list):
                growing = self._lists.setdefault((number, name), GrowingList())
                if (encoded := growing.encode(value)) is not None:
                    yield name, (LIST, encoded)
            elif is_plain(value):
                yield name, packed(value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, owner in enumerate(self._owners):
            values = dict(state[str(number)])
            if OWN in values:
                owner.load_state_dict(values.pop(OWN))
            for name, value in values.items():
                if isinstance(value, tuple) and value[:1] == (LIST,):
                    growing = self._lists.setdefault((number, name), GrowingList())
                    now = vars(owner).get(name)
                    kept = now if isinstance(now, list) else []
                    kept[:] = growing.decode(value[1])
                    vars(owner)[name] = kept
                else:
                    vars(owner)[name] = unpacked(value)


LIST, OWN = "list", "state_dict()"


def _own_state(owner: Any) -> dict[str, Any]:
    """What a callback gives by the documented way."""
    kind = type(owner)
    if not isinstance(owner, Callback) or kind.state_dict is Callback.state_dict:
        return {}
    return {OWN: owner.state_dict()}


class ContinuedWriter(ExperimentWriter):  # type: ignore[misc]
    """Writes on in the file of its predecessor, which Lightning's own writer would delete."""

    def _check_log_dir_exists(self) -> None:
        pass


class CsvPart:
    """How many lines rank 0 had logged when the step was committed: what follows comes again."""

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._writers = [one.experiment for one in loggers if isinstance(one, CSVLogger)]
        self._writers = [one for one in self._writers if isinstance(one, ExperimentWriter)]
        self._lines: list[int] = []
        self.begin_files()
        for number, writer in enumerate(self._writers):
            writer.log_metrics = partial(self._log, number, writer.log_metrics)

    def _log(self, number: int, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._lines[number] += 1
        plain(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"lines": list(self._lines), "waiting": [list(one.metrics) for one in self._writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only the counts: `cut` changes the files, in a replacement alone."""
        self._lines = list(state["lines"])
        for writer, waiting in zip(self._writers, state["waiting"], strict=True):
            writer.metrics = list(waiting)

    def begin_files(self) -> None:
        """What is in the files now was logged before the training: by `validate`, for example."""
        self._lines = [len(_rows(one)) + len(one.metrics) for one in self._writers]

    def cut(self) -> None:
        """Drop the lines that will be written again."""
        for writer, lines in zip(self._writers, self._lines, strict=True):
            rows = _rows(writer)
            if not rows:
                continue
            writer.metrics_keys = list(rows[0])
            rows = rows[: lines - len(writer.metrics)]
            with open(writer.metrics_file_path, "w", newline="") as file:
                again = csv.DictWriter(file, fieldnames=writer.metrics_keys)
                again.writeheader()
                again.writerows(rows)


def _rows(writer: Any) -> list[dict[str, str]]:
    path = Path(writer.metrics_file_path)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
