"""Draw clusterd's machine for docs/recovery.md, from the map that the simulator checks.

python -m tools.diagram            draw again
python -m tools.diagram --check    fail if a drawing is out of date

The drawings are SVG files in docs/images, so that they need neither scripts nor a network. States
are placed in columns, from left to right; an edge that leads back to the left is dashed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean

from taskd.core.clusterd.machine import LEGAL
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingPause,
    AwaitingPods,
    AwaitingRemoval,
    Converging,
    Dumping,
    Ended,
    Exiting,
    Growing,
    HandedOver,
    Idle,
    Killing,
    Migrating,
    Negotiating,
    Pausing,
    PlatformChoosing,
    PlatformConfirming,
    PlatformRanking,
    PreExiting,
    Replacing,
    Resuming,
    Retrying,
    Settling,
    Shrinking,
    Shrunk,
    State,
    Stopping,
    StressTesting,
    SwitchingNic,
)

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "recovery.md"
BEGIN, END = "<!-- drawn by tools/diagram.py -->", "<!-- end of the drawing -->"

GROUPS: dict[str, tuple[type[State], ...]] = {
    "From the fault to the decision": (
        Idle,
        PreExiting,
        PlatformChoosing,
        Stopping,
        Settling,
        PlatformConfirming,
        Negotiating,
        AwaitingPods,
        PlatformRanking,
        Converging,
    ),
    "From the decision to the result": (Retrying, Replacing, Shrinking, Shrunk, Growing, Dumping),
    "Giving up": (Exiting, HandedOver, Killing, Ended),
    "Hot switch": (AwaitingBackup, AwaitingPause, AwaitingRemoval, Migrating),
    "Operations": (Pausing, SwitchingNic, StressTesting, Resuming),
}
"""Every state is the source of its edges in exactly one drawing."""

WIDTH, HEIGHT, GAP_X, GAP_Y, LANE, MARGIN = 138, 28, 62, 16, 14, 16
SWEEPS = 12
STYLE = """\
  <style>
    rect { fill: #fff; stroke: #3f51b5; stroke-width: 1.5 }
    .outside { stroke: #9fa8da; stroke-dasharray: 4 3 }
    text { font: 13px system-ui, sans-serif; fill: #1a237e; text-anchor: middle }
    path { fill: none; stroke: #5c6bc0; stroke-width: 1.3; marker-end: url(#tip) }
    .back { stroke: #ef6c00; stroke-dasharray: 5 3 }
  </style>
  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"
    orient="auto"><polygon points="0,0 10,5 0,10" fill="#5c6bc0"/></marker></defs>
"""


@dataclass
class Place:
    """A state in a column, or (without a name) the point where an edge passes the column."""

    column: int
    name: str = ""
    neighbours: list[Place] = field(default_factory=list)
    """In the columns to the left and to the right."""
    y: float = 0.0

    @property
    def x(self) -> float:
        return MARGIN + self.column * (WIDTH + GAP_X)

    @property
    def height(self) -> float:
        return HEIGHT + GAP_Y if self.name else LANE


def drawings() -> dict[Path, str]:
    """The files and what belongs into them."""
    missing = set(LEGAL) - {state for states in GROUPS.values() for state in states}
    if missing:
        raise ValueError(f"in no drawing: {sorted(state.__name__ for state in missing)}")
    return {DOCS / _image(title): _svg(title, states) for title, states in GROUPS.items()}


def _image(title: str) -> str:
    return f"images/recovery-{title.lower().replace(' ', '-')}.svg"


def _leads_to_stopping(states: tuple[type[State], ...]) -> bool:
    """A new fault leads to Stopping from nearly everywhere. The page says so instead of a drawing
    where it is true for a whole group."""
    return len(states) > 1 and all(Stopping in LEGAL[state] for state in states)


def _edges(states: tuple[type[State], ...]) -> list[tuple[str, str]]:
    return [
        (state.__name__, target.__name__)
        for state in states
        for target in sorted(LEGAL[state], key=lambda kind: kind.__name__)
        if not (target is Stopping and _leads_to_stopping(states)) and target is not state
    ]


def _svg(title: str, states: tuple[type[State], ...]) -> str:
    edges = _edges(states)
    inside = [state.__name__ for state in states]
    order = inside + [target for _, target in edges if target not in inside]
    rank = {name: at for at, name in reversed(list(enumerate(order)))}
    columns, routes = _placed(sorted(rank, key=rank.__getitem__), rank, edges)
    width = max(place.x for place in columns[-1]) + WIDTH + MARGIN
    height = max(sum(place.height for place in column) for column in columns) + 2 * MARGIN
    shapes = [_path(route, is_back) for route, is_back in routes]
    for place in (place for column in columns for place in column if place.name):
        kind = "" if place.name in inside else ' class="outside"'
        x, y = place.x, place.y - HEIGHT / 2
        shapes.append(
            f'  <rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"{kind}/>'
            f'<text x="{x + WIDTH / 2:g}" y="{place.y + 4.5:g}">{place.name}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"  <title>{title}</title>\n{STYLE}"
        f'  <rect width="{width:g}" height="{height:g}" style="stroke:none"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _placed(
    names: list[str], rank: dict[str, int], edges: list[tuple[str, str]]
) -> tuple[list[list[Place]], list[tuple[list[Place], bool]]]:
    """States in columns such that edges go to the right, and each edge as a list of places."""
    before = defaultdict(list)
    for source, target in edges:
        first, second = sorted((source, target), key=rank.__getitem__)
        before[second].append(first)
    column: dict[str, int] = {}
    for name in names:
        column[name] = max((column[other] + 1 for other in before[name]), default=0)
    known = {name: Place(column[name], name) for name in names}
    columns: list[list[Place]] = [[] for _ in range(max(column.values()) + 1)]
    for place in known.values():
        columns[place.column].append(place)
    routes = []
    for source, target in edges:
        left, right = sorted((known[source], known[target]), key=lambda place: place.column)
        lanes = [Place(at) for at in range(left.column + 1, right.column)]
        for lane in lanes:
            columns[lane.column].append(lane)
        route = [left, *lanes, right]
        for one, other in pairwise(route):
            one.neighbours.append(other)
            other.neighbours.append(one)
        is_back = left is known[target]
        routes.append((route[::-1] if is_back else route, is_back))
    _arrange(columns)
    return columns, routes


def _arrange(columns: list[list[Place]]) -> None:
    """Move each place towards the mean of its neighbours, so that few edges cross."""
    tallest = max(sum(place.height for place in column) for column in columns)
    for _ in range(SWEEPS):
        for column in columns:
            column.sort(key=lambda place: mean(other.y for other in place.neighbours or [place]))
            top = MARGIN + (tallest - sum(place.height for place in column)) / 2
            for place in column:
                place.y = top + place.height / 2
                top += place.height


def _path(route: list[Place], is_back: bool) -> str:
    start, *rest = route
    enter, leave, lower = (WIDTH, 0, 6) if is_back else (0, WIDTH, 0)
    x, y = start.x + leave, start.y + lower
    steps = [f"M{x:g} {y:g}"]
    for place in rest:
        near, level = place.x + enter, place.y + lower
        bend = (near - x) / 2
        steps.append(f"C{x + bend:g} {y:g} {near - bend:g} {level:g} {near:g} {level:g}")
        x, y = place.x + leave, level
        if place is not rest[-1]:
            steps.append(f"H{x:g}")
    kind = ' class="back"' if is_back else ""
    return f'  <path{kind} d="{"".join(steps)}"/>'


def redrawn(page: str) -> str:
    """The page with a section for each drawing."""
    sections = []
    for title, states in GROUPS.items():
        note = (
            "From each of these states a new fault leads to `Stopping` (not drawn).\n\n"
            if _leads_to_stopping(states)
            else ""
        )
        again = [state.__name__ for state in states if state in LEGAL[state]]
        if again:
            note += f"`{'`, `'.join(again)}` may follow itself (not drawn).\n\n"
        sections.append(f"#### {title}\n\n{note}![{title}]({_image(title)})")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n\n".join([before + BEGIN, *sections, END + after])


def main() -> int:
    wanted = {PAGE: redrawn(PAGE.read_text()), **drawings()}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text() != wanted[path] for path in wanted))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
