"""A manager process with plugins from `plugin_dir`: the documented one reaches an agent."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

from taskd.model import messages as m
from taskd.model.ids import Rank, manager
from tests import ROOT
from tests.integration.manager.test_manager import AscendAgent, managing

DOCUMENT = ROOT / "docs/guides/plugins.md"

OTHER = """
    from taskd.model.messages import KeptAlive

    class Other:
        name = {name}

        def predicate(self, snapshot):
            self.note(snapshot.state)
            return any(rank.fault for rank in snapshot.ranks)

        def handle(self):
            return "final"

        def pull_messages(self):
            return [("Agent0", KeptAlive(fault_ranks={ranks}))]

        def release(self):
            self.note("released")

        def note(self, text):
            with open({notes!r}, "a") as file:
                print(text, file=file)

    plugin = Other()
"""


def write(path: Path, name: object, ranks: object) -> None:
    notes = str(path.with_suffix(".txt"))
    path.write_text(textwrap.dedent(OTHER).format(name=repr(name), ranks=repr(ranks), notes=notes))


def test_documented_plugin_works_beside_broken_ones(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    write(plugins / "a.py", "sends what cannot be sent", 5)
    write(plugins / "b.py", ["no text"], ())
    write(plugins / "c.py", "good", ())
    example = DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0]
    (plugins / "record.py").write_text(example)

    async def play() -> None:
        words = ["--strategies", "recover-in-place", "--plugin-dir", str(plugins)]
        async with managing(tmp_path / "state", *words) as port:
            peer = AscendAgent(port)
            await peer.join(2)
            assert await peer.hears() == m.StartWorkers(2)
            await peer.bus.send(manager(), m.RanksFailed((Rank(0),), 1735689600))
            heard: list[m.Body] = []
            # The plugin's message arrives, and the job continues as without it.
            while not {m.SetProfiling, m.RestartAgent} <= set(map(type, heard)):
                heard.append(await peer.hears())
            assert m.SetProfiling(default_domain=True, communication=True) in heard
            await peer.bus.close()

    asyncio.run(play())
    assert (plugins / "c.txt").read_text().endswith("released\n")
    assert "released" not in (plugins / "a.txt").read_text(), "it was disabled"
    assert not (plugins / "b.txt").exists(), "it was never one"
