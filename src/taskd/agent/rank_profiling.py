"""The agent's end of profiling: says to the node's ranks what to record, and reads their paces.

Through shared memory (`runtime/profiling_files.py`), so that a rank needs no connection and no
thread for it.
"""

from __future__ import annotations

from pathlib import Path

from taskd.model.ids import Incarnation, Rank
from taskd.model.messages import SetProfiling
from taskd.model.profiling import NOTHING, Pace, parts_ordered
from taskd.runtime.profiling_files import Page, forget, read_pace

Life = tuple[Rank, Incarnation]


class Probes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wanted = NOTHING
        self._pages: dict[Life, Page] = {}
        self._told: dict[Life, Pace] = {}

    def prepare(self, life: Life) -> str:
        """The path of the page for a new life, which already says what is wanted."""
        page = Page(str(self._folder / f"rank{life[0]}.{life[1]}.probe"))
        page.want(self._wanted)
        self._pages[life] = page
        return page.path

    def remove(self, life: Life) -> None:
        self._told.pop(life, None)
        if (page := self._pages.pop(life, None)) is not None:
            forget(page.path)

    def order(self, order: SetProfiling) -> None:
        self._wanted = parts_ordered(order.default_domain, order.communication, order.parts)
        for page in self._pages.values():
            page.want(self._wanted)

    def look(self) -> tuple[Pace, ...]:
        """The paces that are news."""
        news = []
        for life, page in self._pages.items():
            pace = read_pace(page.path)
            if pace is not None and pace != self._told.get(life):
                self._told[life] = pace
                news.append(pace)
        return tuple(news)
