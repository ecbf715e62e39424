"""User plugins: Python files in `plugin_dir` that observe the job and send messages.

A file defines `plugin`, an object with

    name                    a unique name, for the log
    predicate(snapshot)     True: the plugin wants to act on this snapshot
    handle()                act; return FINAL when done, PROCESS to be called again next time
    pull_messages()         what to send: pairs of a receiver and a message
    release()               called when the manager ends

A receiver is `Agent3`, `Worker7` or a `Position`; a message is a value of `taskd.model.messages`.
Plugins do not decide about recovery, clusterd does; they add to it.

They run in a separate thread, one after another, on the newest snapshot only. A plugin that raises
or takes too long is disabled with an error in the log and does no harm: its exception ends in the
future of its call.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args

from taskd.core.manager.states import State
from taskd.errors import SettingsError
from taskd.model.ids import Position, Role
from taskd.model.messages import Body
from taskd.runtime.loop_thread import LoopThread
from taskd.wire.bus_bodies import decode, encode

log = logging.getLogger(__name__)

T = TypeVar("T")
THREAD = "taskd-plugins"
PROCESS, FINAL = "process", "final"
BODIES = get_args(Body)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    rank: int
    node: int
    phase: str
    step: int
    fault: str
    """The cause of its fault; empty: none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a plugin sees of the job. Changing it has no effect on the job."""

    job_id: str
    state: str
    because: str
    incident: int
    ranks: tuple[RankSnapshot, ...]


class Plugin(Protocol):
    @property
    def name(self) -> str: ...
    def predicate(self, snapshot: Snapshot) -> bool: ...
    def handle(self) -> str: ...
    def pull_messages(self) -> Iterable[tuple[str | Position, Body]]: ...
    def release(self) -> None: ...


class PluginError(SettingsError):
    """A plugin violates the contract above."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])


def snapshot_of(job_id: str, state: State, because: str) -> Snapshot:
    job = state.job
    return Snapshot(
        job_id,
        type(state).__name__,
        because,
        job.incident,
        tuple(
            RankSnapshot(
                rank,
                view.node,
                view.phase or view.process.value,
                view.step,
                job.faults[rank].cause if rank in job.faults else "",
            )
            for rank, view in sorted(job.view.ranks.items())
        ),
    )


class Plugins:
    def __init__(
        self,
        directory: Path,
        send: Callable[[Position, Body], None],
        node_of: Callable[[int], int | None],
        limit_s: float = 5.0,
    ) -> None:
        self._directory, self._send, self._node_of = directory, send, node_of
        self._limit_s = limit_s
        self._thread = LoopThread(THREAD)
        self._plugins: dict[str, Plugin] = {}
        self._acting: set[str] = set()
        self._newest: Snapshot | None = None
        self._changed = asyncio.Event()

    def show(self, snapshot: Snapshot) -> None:
        """Replace the snapshot that the plugins will see next."""
        self._newest = snapshot
        self._changed.set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._plugins)

    async def run(self) -> None:
        await self._load()
        while self._plugins:
            await self._changed.wait()
            self._changed.clear()
            assert self._newest is not None
            for name in tuple(self._plugins):
                await self._run_plugin(name, self._newest)

    async def close(self) -> None:
        for name in tuple(self._plugins):
            await self._call(name, self._plugins[name].release)
        self._thread.stop()

    async def _load(self) -> None:
        files: dict[str, str] = {}
        for path in sorted(self._directory.glob("*.py")):
            loaded = await self._call(path.name, lambda path=path: _load(path))  # type: ignore[misc]
            if loaded is None:
                continue
            name, plugin = loaded
            if name in files:
                log.error(
                    "plugin %s is disabled: %s is also named %s", path.name, files[name], name
                )
                continue
            log.info("plugin %s loaded from %s", name, path.name)
            files[name], self._plugins[name] = path.name, plugin

    async def _run_plugin(self, name: str, snapshot: Snapshot) -> None:
        messages = await self._call(name, lambda: self._turn(name, snapshot))
        for receiver, body in messages or ():
            self._send(receiver, body)

    def _turn(self, name: str, snapshot: Snapshot) -> list[tuple[Position, Body]]:
        """Runs in the plugins' thread."""
        plugin = self._plugins[name]
        if name not in self._acting and not plugin.predicate(snapshot):
            return []
        self._acting.add(name)
        if (stage := plugin.handle()) not in (PROCESS, FINAL):
            raise PluginError(f"handle() returned {stage!r}, expected {PROCESS!r} or {FINAL!r}")
        if stage == FINAL:
            self._acting.discard(name)
        return [(self._place(receiver), _body(body)) for receiver, body in plugin.pull_messages()]

    def _place(self, receiver: str | Position) -> Position:
        if isinstance(receiver, Position):
            return receiver
        for role in (Role.AGENT, Role.WORKER):
            number = str(receiver).removeprefix(role)
            if str(receiver).startswith(role) and number.isdecimal():
                if role is Role.AGENT:
                    return Position(role, number)
                if (node := self._node_of(int(number))) is not None:
                    return Position(role, str(node), number)
        raise PluginError(
            f"invalid receiver {receiver!r}: expected Agent<node>, Worker<rank> or a Position"
        )

    async def _call(self, name: str, work: Callable[[], T]) -> T | None:
        """Returns None if the plugin raised or took too long; it is disabled then."""
        future = asyncio.wrap_future(self._thread.run(_as_task(work)))
        await asyncio.wait((future,), timeout=self._limit_s)
        if future.done() and (error := future.exception()) is None:
            return future.result()
        if not future.done():
            # Its thread is blocked; the other plugins continue in a new one.
            self._thread = LoopThread(THREAD)
            future.add_done_callback(lambda late: late.cancelled() or late.exception())
            self._disable(name, f"it has not returned within {self._limit_s:g} s")
        else:
            self._disable(name, f"{type(error).__name__}: {error}")
        return None

    def _disable(self, name: str, why: str) -> None:
        log.error("plugin %s is disabled: %s", name, why)
        self._plugins.pop(name, None)
        self._acting.discard(name)


async def _as_task(work: Callable[[], T]) -> T:
    """Exceptions end in the task, but SystemExit would also end the thread."""
    try:
        return work()
    except SystemExit as ended:
        raise PluginError(f"it called exit({ended.code})") from None


def _load(path: Path) -> tuple[str, Plugin]:
    spec = importlib.util.spec_from_file_location(f"taskd_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin: Any = getattr(module, "plugin", None)
    wanted = ("name", "predicate", "handle", "pull_messages", "release")
    missing = [name for name in wanted if not hasattr(plugin, name)]
    if missing:
        raise PluginError(f"its `plugin` lacks {', '.join(missing)}")
    if type(named := plugin.name) is not str or not named:
        raise PluginError(f"its name must be a non-empty string, got {named!r}")
    return named, plugin


def _body(body: object) -> Body:
    if not isinstance(body, BODIES):
        raise PluginError(f"{type(body).__name__} is not a message of taskd.model.messages")
    try:
        decode(encode(cast(Body, body)), Role.MANAGER)
    except (TypeError, ValueError, AttributeError) as error:
        raise PluginError(f"{body!r} cannot be sent: {error}") from error
    return cast(Body, body)
