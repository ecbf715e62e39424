"""`torch.distributed.checkpoint` (DCP) in a protected job.

DCP plans every checkpoint with all ranks, in object collectives. A replacement runs the script's
set-up alone, often with a checkpoint that did not exist when its predecessor ran it:

- it loads alone: each rank reads what it needs, and no other rank has to know;
- it does not save: its predecessor has saved with the others, and they are beyond that;
- the other ranks do not record DCP's collectives as results of the set-up, so the numbers of the
  collectives that follow are the same with and without a checkpoint.

After a repair, plans that DCP has cached are dropped, because a replacement does not have them, and
a save in the background that began before it ends with an error instead of meeting the wrong peers.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.distributed as dist

from taskd.torch import compat
from taskd.torch.groups.all_groups import Groups, Mode

log = logging.getLogger(__name__)

PACKAGE = "torch.distributed.checkpoint"


def support(groups: Groups) -> None:
    """Make DCP work in these groups; it is not imported before the script does so."""
    adapter = DcpAdapter(groups)
    if PACKAGE in sys.modules:
        adapter.install()
    else:
        sys.meta_path.insert(0, AfterImport(PACKAGE, adapter.install))


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


class DcpAdapter:
    """Changes DCP's collectives and its `save` for the groups of this process."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._plans_of = groups.formed
        """The formation of the groups that DCP's cached plans belong to."""

    def install(self) -> None:
        compat.check_checkpoints()
        compat.wrap_checkpoint_collectives(self._started, self._collective)
        compat.wrap_checkpoint_save(self._save)

    def _started(self, collectives: Any) -> None:
        """A load or save begins."""
        collectives.taskd_formed = self._groups.formed
        if collectives.use_dist and self._groups.mode is Mode.SOLO:
            # As with `no_dist`, but with its own rank: some formats have one file per rank.
            collectives.use_dist, collectives.is_coordinator = False, True

    def _collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(collectives: Any, *args: Any, **kwargs: Any) -> Any:
            if collectives.use_dist and collectives.taskd_formed != self._groups.formed:
                raise dist.DistBackendError(
                    "the job was repaired while this checkpoint was being saved or loaded in the "
                    "background, so it is not complete. Save it again"
                )
            with self._groups.setup.paused():
                return original(collectives, *args, **kwargs)

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
            return original(state_dict, storage_writer, *args, **kwargs)

        return save
