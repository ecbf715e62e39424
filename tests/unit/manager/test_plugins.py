"""Plugins from `plugin_dir` work as documented, and a bad plugin does no harm."""

from __future__ import annotations

import asyncio
import logging
import textwrap
from pathlib import Path

import pytest

from taskd.manager.plugins import Plugins, RankSnapshot, Snapshot
from taskd.model.ids import Position, agent, worker
from taskd.model.messages import Body, KeptAlive

GOOD = """
    from taskd.model.messages import KeptAlive

    class Greeter:
        name = "greeter"
        def __init__(self):
            self.turns, self.log = 0, open("{log}", "a")
        def predicate(self, snapshot):
            return snapshot.state == "Training"
        def handle(self):
            self.turns += 1
            return "final" if self.turns % 2 == 0 else "process"
        def pull_messages(self):
            return [("Agent0", KeptAlive()), ("Worker3", KeptAlive())]
        def release(self):
            self.log.write("released")
            self.log.close()

    plugin = Greeter()
"""
BAD = """
    class Bad:
        name = "bad"
        def predicate(self, snapshot):
            {predicate}
        def handle(self):
            {handle}
        def pull_messages(self):
            {pull}
        def release(self):
            pass

    plugin = Bad()
"""
KEPT = "from taskd.model.messages import KeptAlive"


def snapshot(state: str = "Training") -> Snapshot:
    return Snapshot("job", state, "", 0, (RankSnapshot(3, 1, "training", 7, ""),))


class Stage:
    def __init__(self, folder: Path, limit_s: float = 10.0) -> None:
        self.sent: list[tuple[Position, Body]] = []
        self.arrived = asyncio.Event()
        self.plugins = Plugins(folder, self._send, {3: 1}.get, limit_s)

    def _send(self, to: Position, body: Body) -> None:
        self.sent.append((to, body))
        self.arrived.set()

    async def until_sent(self) -> None:
        async with asyncio.timeout(30):
            await self.arrived.wait()
        self.arrived.clear()


def write(folder: Path, name: str, text: str, **words: object) -> None:
    (folder / name).write_text(textwrap.dedent(text).format(**words))


def bad(
    predicate: str = "return True",
    handle: str = "return 'final'",
    pull: str = "return []",
) -> dict[str, str]:
    return {"predicate": predicate, "handle": handle, "pull": pull}


def named(name: str) -> str:
    """A valid plugin with this name."""
    text = textwrap.dedent(BAD).format(**bad())
    return text.replace("'bad'", name).replace('"bad"', name)


def test_plugin_sees_acts_sends_and_is_released(tmp_path: Path) -> None:
    async def play() -> None:
        write(tmp_path, "greet.py", GOOD, log=tmp_path / "log")
        stage = Stage(tmp_path)
        running = asyncio.create_task(stage.plugins.run())
        stage.plugins.show(snapshot())
        await stage.until_sent()
        assert stage.sent == [(agent(0), KeptAlive()), (worker(1, 3), KeptAlive())]
        # It has not finished, so it is called again with any snapshot.
        stage.plugins.show(snapshot("Stopping"))
        await stage.until_sent()
        assert len(stage.sent) == 4
        running.cancel()
        await stage.plugins.close()
        assert (tmp_path / "log").read_text() == "released"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def (:", "SyntaxError"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "it called exit(3)"),
        ("plugin = object()", "lacks name, predicate"),
        (named("['x']"), "its name must be a non-empty string, got ['x']"),
        (named("''"), "its name must be a non-empty string, got ''"),
        (named("property(lambda self: 1 / 0)"), "ZeroDivisionError"),
    ],
)
def test_file_without_a_plugin_is_skipped(
    tmp_path: Path, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        (tmp_path / "a.py").write_text(text)
        write(tmp_path, "b.py", GOOD, log=tmp_path / "log")
        stage = Stage(tmp_path)
        running = asyncio.create_task(stage.plugins.run())
        stage.plugins.show(snapshot())
        await stage.until_sent()
        assert stage.plugins.names == ("greeter",)
        running.cancel()
        await stage.plugins.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(play())
    assert why in caplog.text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (bad(predicate="1 / 0"), "ZeroDivisionError"),
        (bad(handle="raise RuntimeError('no')"), "RuntimeError: no"),
        (bad(handle="return 'maybe'"), "expected 'process' or 'final'"),
        (bad(pull="return [('Agent0', 'hello')]"), "str is not a message"),
        (bad(pull="return [('Nobody', None)]"), "invalid receiver"),
        (bad(pull="return [('Worker99', None)]"), "invalid receiver"),
        (bad(pull="return 5"), "TypeError"),
        (
            bad(pull=f"{KEPT}; return [('Agent0', KeptAlive(fault_ranks=5))]"),
            "KeptAlive(fault_ranks=5, restart_times=-1) cannot be sent",
        ),
        (
            bad(pull=f"{KEPT}; return [('Agent0', KeptAlive(restart_times=object()))]"),
            "cannot be sent",
        ),
    ],
)
def test_plugin_that_misbehaves_is_disabled_and_the_others_continue(
    tmp_path: Path, words: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        write(tmp_path, "a.py", BAD, **words)
        write(tmp_path, "b.py", GOOD, log=tmp_path / "log")
        stage = Stage(tmp_path)
        running = asyncio.create_task(stage.plugins.run())
        stage.plugins.show(snapshot())
        await stage.until_sent()
        assert stage.plugins.names == ("greeter",)
        running.cancel()
        await stage.plugins.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(play())
    assert why in caplog.text


def test_first_of_two_plugins_with_the_same_name_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        write(tmp_path, "a.py", GOOD, log=tmp_path / "log")
        (tmp_path / "b.py").write_text(named("'greeter'"))
        stage = Stage(tmp_path)
        running = asyncio.create_task(stage.plugins.run())
        stage.plugins.show(snapshot())
        await stage.until_sent()
        assert stage.plugins.names == ("greeter",)
        running.cancel()
        await stage.plugins.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(play())
    assert "plugin b.py is disabled: a.py is also named greeter" in caplog.text


def test_plugin_that_never_returns_is_disabled(tmp_path: Path) -> None:
    async def play() -> None:
        hang = "import threading; threading.Event().wait(60)"
        write(tmp_path, "a.py", BAD, **bad(handle=hang))
        write(tmp_path, "b.py", GOOD, log=tmp_path / "log")
        stage = Stage(tmp_path, limit_s=1.0)
        running = asyncio.create_task(stage.plugins.run())
        stage.plugins.show(snapshot())
        await stage.until_sent()
        assert stage.plugins.names == ("greeter",)
        running.cancel()
        await stage.plugins.close()

    asyncio.run(play())
