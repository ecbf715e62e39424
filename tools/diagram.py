"""Draw the recovery machine into docs/recovery.md, from the map that the simulator checks.

python -m tools.diagram            redraw
python -m tools.diagram --check    fail when the drawing is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

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

PAGE = Path(__file__).parent.parent / "docs" / "recovery.md"
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


def draw() -> str:
    missing = set(LEGAL) - {state for states in GROUPS.values() for state in states}
    if missing:
        raise ValueError(f"in no drawing: {sorted(state.__name__ for state in missing)}")
    return "\n\n".join(_block(title, states) for title, states in GROUPS.items())


def _block(title: str, states: tuple[type[State], ...]) -> str:
    """A new fault leads to Stopping from nearly everywhere; where it does so from a whole group
    of repairs or operations, that is said in words, not drawn."""
    everywhere = len(states) > 1 and all(Stopping in LEGAL[state] for state in states)
    lines = [f"#### {title}", ""]
    if everywhere:
        lines += ["From every one of these a new fault leads to `Stopping` (not drawn).", ""]
    lines += ["```mermaid", "stateDiagram-v2"]
    for state in states:
        for target in sorted(LEGAL[state], key=lambda kind: kind.__name__):
            if not (everywhere and target is Stopping):
                lines.append(f"    {state.__name__} --> {target.__name__}")
    return "\n".join([*lines, "```"])


def redrawn(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{draw()}\n\n{END}{after}"


def main() -> int:
    page = PAGE.read_text()
    wanted = redrawn(page)
    if "--check" in sys.argv:
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
