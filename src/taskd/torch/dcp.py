"""`torch.distributed.checkpoint` (DCP) in a protected job.

DCP plans every checkpoint with all ranks, in object collectives. A replacement runs the script's
set-up alone, often with a checkpoint that did not exist when its predecessor ran it:

- it loads alone: each rank reads what it needs, and no other rank has to know;
- it does not save: its predecessor has saved with the others, and they are beyond that;
- the other ranks do not record DCP's collectives as results of the set-up, so the numbers of the
  collectives that follow are the same with and without a checkpoint.

A save that a fault interrupts must not become a checkpoint that looks complete: inside a step, lost
collectives return this rank's own data instead of an error. So every collective of DCP is checked.
A save in the background (`async_save`) belongs to the groups that existed when it was called. It
never meets those that are formed after a repair, and its failure does not end training.
The same holds for a save between two steps, and for one after a step at whose end the job was
repaired, if the replacement is not in it. A save in a section is repeated.
Plans that DCP has cached are dropped after a repair, because a replacement does not have them.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from taskd.errors import SettingsError, Transient
from taskd.torch import compat
from taskd.torch.groups import sealed_objects
from taskd.torch.groups.all_groups import Groups, Mode

log = logging.getLogger(__name__)

PACKAGE = "torch.distributed.checkpoint"
INTERRUPTED = "the job lost a rank while the checkpoint was being saved or loaded"


def support(groups: Groups) -> None:
    """Make DCP work in these groups; it is not imported before the script does so."""
    adapter = DcpAdapter(groups)
    if PACKAGE in sys.modules:
        adapter.install()
    else:
        sys.meta_path.insert(0, AfterImport(PACKAGE, adapter.install))


class CheckpointInterrupted(Transient, RuntimeError):
    """The job lost a rank while a checkpoint was being saved or loaded."""


class AfterImport(MetaPathFinder):
    """Calls a function as soon as a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _broadcast(collectives: Any, object: Any) -> Any:
    coordinator = compat.checkpoint_coordinator(collectives)
    return sealed_objects.broadcast(object, coordinator, collectives.group)


def _gather(collectives: Any, object: Any) -> list[Any] | None:
    coordinator = compat.checkpoint_coordinator(collectives)
    return sealed_objects.gather(object, coordinator, collectives.group)


def _all_gather(collectives: Any, object: Any) -> list[Any]:
    return sealed_objects.all_gather(object, collectives.group)


def _scatter(collectives: Any, object_list: list[Any] | None) -> Any:
    coordinator = compat.checkpoint_coordinator(collectives)
    return sealed_objects.scatter(object_list, coordinator, collectives.group)


SEALED: dict[str, Callable[..., Any]] = {
    "broadcast_object": _broadcast,
    "gather_object": _gather,
    "all_gather_object": _all_gather,
    "scatter_object": _scatter,
}
"""What DCP exchanges, without unpickling what a process outside the job has sent."""


class DcpAdapter:
    """Changes DCP's collectives and its `save` for the groups of this process."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._plans_of = groups.formed
        """The formation of the groups that DCP's cached plans belong to."""
        self._background = threading.local()
        """`formed` in a thread of `async_save`: the formation when it was called."""

    def install(self) -> None:
        compat.check_checkpoints()
        compat.wrap_checkpoint_collectives(self._started, self._collective)
        compat.wrap_checkpoint_save(self._save)
        compat.wrap_checkpoint_thread(self._mark_thread)

    def _mark_thread(self, executor: ThreadPoolExecutor, group: Any) -> None:
        """`async_save` was called. The executor has one thread, and only for this save.

        Raises:
            SettingsError: Its collectives would run in another thread in the same group as those
                of the training, in an order that no two ranks agree on.
        """
        if group is self._groups.world and group.size() > 1:
            raise SettingsError(
                [
                    "dcp.async_save needs a process group of its own, because training uses the "
                    'default one at the same time: create it with dist.new_group(backend="gloo") '
                    "before the first step, and pass it as process_group=…"
                ]
            )
        if not self._groups.absorbing:
            self._groups.on_outside()
        executor.submit(setattr, self._background, "formed", self._formed_for_script())

    @property
    def _is_background(self) -> bool:
        return hasattr(self._background, "formed")

    @property
    def _may_go_on(self) -> bool:
        """The script can continue without this checkpoint, to the next step, which is repaired.

        Not in the set-up, nor in a section or step, which are repeated as a whole.
        """
        between_steps = self._groups.formed_for_step is not None and not self._groups.absorbing
        return self._is_background or between_steps

    def _formed_for_script(self) -> int:
        """The formation in which all ranks run the code that the script runs now."""
        groups = self._groups
        return groups.formed if groups.formed_for_step is None else groups.formed_for_step

    def _started(self, collectives: Any) -> None:
        """A load or save begins."""
        collectives.taskd_formed = getattr(self._background, "formed", self._formed_for_script())
        if collectives.use_dist and self._groups.mode is Mode.SOLO:
            # As with `no_dist`, but with its own rank: some formats have one file per rank.
            collectives.use_dist, collectives.is_coordinator = False, True

    def _collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        groups = self._groups
        exchange = SEALED.get(original.__name__, original)

        def is_lost(collectives: Any) -> bool:
            return groups.mode is Mode.BROKEN or collectives.taskd_formed != groups.formed

        @wraps(original)
        def run(collectives: Any, *args: Any, **kwargs: Any) -> Any:
            if not collectives.use_dist:
                return original(collectives, *args, **kwargs)
            if is_lost(collectives):
                raise CheckpointInterrupted(INTERRUPTED)
            group = collectives.group or groups.world
            transport = getattr(group, "transport", None)
            try:
                with groups.setup.paused():
                    result = exchange(collectives, *args, **kwargs)
            except Exception as error:
                if isinstance(error, RuntimeError) or is_lost(collectives):
                    if self._may_go_on and transport is not None:
                        # Other survivors may wait for us in the same save, and their training
                        # threads for it: no repair begins before they have reached a step.
                        transport.abort()
                    raise CheckpointInterrupted(f"{INTERRUPTED}: {error}") from error
                raise  # such as an object that cannot be pickled
            if is_lost(collectives):
                raise CheckpointInterrupted(INTERRUPTED)
            return result

        return run

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save(state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._groups.mode is Mode.SOLO:
                log.info("checkpoint of the set-up is not saved again by a replacement")
                return compat.no_checkpoint()
            if self._plans_of != self._groups.formed:
                compat.forget_checkpoint_plans()
                self._plans_of = self._groups.formed
            try:
                return original(state_dict, storage_writer, *args, **kwargs)
            except CheckpointInterrupted as error:
                if not self._may_go_on:
                    raise
                log.warning(
                    "checkpoint is not complete: path=%s: %s. Training continues; only the next "
                    "save writes a complete one",
                    getattr(storage_writer, "checkpoint_id", "unknown"),
                    error,
                )
                return compat.no_checkpoint()

        return save
