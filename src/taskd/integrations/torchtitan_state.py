"""The state of a torchtitan Trainer, as parts that a job can protect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from taskd.errors import SettingsError
from taskd.torch.data.given_batch import GivenBatch


class DataPart:
    """The position of the dataloader, and the batches of the present step.

    The loader cannot go back, so the batches are kept: a repeated step gets them again.
    """

    def __init__(self, loader: Any, open_loader: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._open = loader, open_loader
        self._iterator: Iterator[Any] | None = None
        self._taken, self._position = 0, loader.state_dict()
        self._kept: _Kept | None = None

    def take(self, count: int) -> Iterator[Any]:
        """The next batches. After `load_state_dict` the same ones again."""
        kept = self._kept
        if kept is None or kept.before != self._taken:
            kept = self._kept = self._read(count)
        self._taken, self._position = kept.before + count, kept.position
        return iter([batch.give() for batch in kept.batches])

    def _read(self, count: int) -> _Kept:
        before = self._position
        batches = self._next(count)
        after = self._loader.state_dict()
        if not self._taken and after == before:
            raise SettingsError(
                [
                    "taskd.integrations.torchtitan: the state_dict() of "
                    f"{type(self._loader).__name__} does not change when a batch is read: a "
                    "replacement could not continue where its predecessor was"
                ]
            )

        def again(index: int) -> Any:
            self._go_to(before)
            return self._next(count)[index]

        given = [
            GivenBatch(batch, lambda index=index: again(index))  # type: ignore[misc]
            for index, batch in enumerate(batches)
        ]
        return _Kept(self._taken, given, after)

    def _next(self, count: int) -> list[Any]:
        if self._iterator is None:
            self._iterator = self._open()
        return [next(self._iterator) for _ in range(count)]

    def _go_to(self, position: Any) -> None:
        self._loader.load_state_dict(position)
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        taken, kept = state["taken"], self._kept
        is_near = kept is not None and taken in (kept.before, kept.before + len(kept.batches))
        if taken != self._taken and not is_near:
            self._kept = None
            self._go_to(state["position"])
        self._taken, self._position = taken, state["position"]


@dataclass(frozen=True)
class _Kept:
    """The batches of one step."""

    before: int
    """How many batches were read before."""
    batches: list[GivenBatch]
    position: Any
    """Where the loader is after them."""


class TrainerPart:
    """The counters of the trainer, and what the step has logged.

    The number of the step is left out: torchtitan counts it before the step begins, and it follows
    from the position in the loop.
    """

    def __init__(self, trainer: Any, total: int) -> None:
        """`total`: the number of steps of the training, if nothing ends it early."""
        self._trainer, self.total = trainer, total
        self.logged: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        counters = {
            name: value for name, value in self._trainer.state_dict().items() if name != "step"
        }
        return {"counters": counters, "logged": self.logged, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(self._trainer.state_dict() | state["counters"])
        self.logged, self.total = list(state["logged"]), state["total"]
