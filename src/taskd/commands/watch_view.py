"""The screen of `taskd status --watch` in a terminal: fits its size, with colours if it has them.

Pure. Output that does not go to a terminal is that of `render.status`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taskd.dashboard import incidents, views
from taskd.wire._pb import control_pb2 as pb

RESET = "\x1b[0m"
COLOURS = {"good": "\x1b[32m", "warn": "\x1b[33m", "bad": "\x1b[31m", "info": "\x1b[34m"}
STRONG, QUIET = "\x1b[1m", "\x1b[2m"
TONES = {
    "training": "good",
    "done": "good",
    "slow": "warn",
    "recovering": "info",
    "starting": "info",
    "paused": "info",
    "failed": "bad",
    "unknown": "warn",
}
PHASE_TONES = {"training": "good", "dead": "bad", "parked": "warn"}
BAR, LEAST_BAR, LANE = 24, 8, 28
LEAST_WIDTH, LEAST_HEIGHT = 40, 12


@dataclass(frozen=True, slots=True)
class Terminal:
    width: int = 80
    height: int = 24
    colour: bool = False

    def paint(self, text: str, style: str) -> str:
        return f"{style}{text}{RESET}" if self.colour and style else text


def screen(
    status: pb.JobStatus, found: Sequence[incidents.Incident], now_ms: int, terminal: Terminal
) -> str:
    width = max(terminal.width, LEAST_WIDTH) - 1
    health, headline = views.health_of(status, views.LIVE)
    tone = COLOURS[TONES[health]]
    top = [
        terminal.paint(_cut(f"{status.line.job}  {headline}", width), STRONG + tone),
        _cut(progress_line(status, width), width),
    ]
    bottom = _incident(found, now_ms, width, terminal)
    bottom += ["", *(terminal.paint(line, QUIET) for line in _hint(status, found, health, width))]
    room = max(terminal.height, LEAST_HEIGHT) - len(top) - len(bottom) - 3
    return "\n".join([*top, "", *_ranks(status, width, max(room, 3), terminal), *bottom])


def progress_line(status: pb.JobStatus, width: int = 80) -> str:
    """Step, pace, time left and goodput. The bar gets the room that is left."""
    line, total = status.line, status.total_steps
    parts = [f"{line.step:,} of {total:,}" if total > 0 else f"step {line.step:,}"]
    if line.steps_per_s:
        parts.append(f"{line.steps_per_s:.2f} steps/s")
        left = total - line.step
        if left > 0:
            parts.append(f"{_span(left / line.steps_per_s)} left")
    if status.goodput:
        parts.append(f"goodput {100 * status.goodput:.1f} %")
    text = "  ".join(parts)
    size = min(BAR, width - len(text) - len("[] "))
    if total <= 0 or size < LEAST_BAR:
        return text
    done = round(min(1.0, line.step / total) * size)
    return f"[{'#' * done}{'.' * (size - done)}] {text}"


def _hint(
    status: pb.JobStatus, found: Sequence[incidents.Incident], health: str, width: int
) -> list[str]:
    """A command is never cut, so that it can be copied: the terminal wraps a long one."""
    text = _printable(f"hint: {hint(status, found, health)}")
    if len(text) <= width:
        return [text]
    said, colon, command = text.partition(": taskd ")
    return [_cut(said + colon[:1], width), *([f"  taskd {command}"] if command else [])]


def hint(status: pb.JobStatus, found: Sequence[incidents.Incident], health: str) -> str:
    """What a person can do next."""
    job = status.line.job
    if health == "recovering":
        return f"nothing to do; to see why: taskd replay {job} --incident {status.line.incident}"
    if health == "slow" and status.stragglers:
        return f"to see where rank {status.stragglers[0].rank} loses time: taskd profile {job} on"
    if health == "slow":
        return "start a node again, and the job grows back"
    if health in ("done", "failed"):
        return "the last lines of taskd run say how to get a report"
    if health == "starting":
        return "it waits for all ranks; check the nodes that are missing"
    often = Counter(node for each in found for node in incidents.brief(each)["nodes"])
    worst = often.most_common(1)
    if worst and worst[0][1] >= 3:
        return f"node {worst[0][0]} has caused {worst[0][1]} incidents: taskd stress {job}"
    if found:
        return f"all incidents: taskd replay {job} --html report.html"
    return f"in a browser: taskd dashboard {job}"


def _incident(
    found: Sequence[incidents.Incident], now_ms: int, width: int, terminal: Terminal
) -> list[str]:
    if not found:
        return []
    last = incidents.shown(found, len(found) - 1)
    ago = _span((now_ms - last["beganUnixMs"]) / 1000)
    result = "in progress" if last["open"] else f"{last['outcome']} in {last['tookMs']:.0f} ms"
    tone = COLOURS["info" if last["open"] else "good" if last["good"] else "bad"]
    head = f"last incident, {ago} ago: {last['title']}"
    lines = ["", _cut(head, width), terminal.paint(_cut(f"  {result}", width), tone)]
    return lines + [f"  {line}" for line in lanes(last["lanes"], width - 2)]


def lanes(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """One line per phase: when it ran, how long, and how long it usually takes."""
    total = sum(row["tookMs"] for row in rows)
    size = min(LANE, max(width - 36, 0))
    at, drawn = 0.0, []
    for row in rows if total > 0 else ():
        begin = round(size * at / total)
        length = max(1, round(size * row["tookMs"] / total))
        bar = f"{' ' * begin}{'=' * min(length, size - begin)}".ljust(size)
        usual = "" if row["medianMs"] is None else f"  usual {row['medianMs']:.0f}"
        drawn.append(_cut(f"{row['name']:<9}{bar} {row['tookMs']:>6.0f} ms{usual}", width))
        at += row["tookMs"]
    return drawn


def _ranks(status: pb.JobStatus, width: int, room: int, terminal: Terminal) -> list[str]:
    """A line per rank; if they do not fit, a line per node; if those do not fit, the worst."""
    if len(status.ranks) < room:
        head = f"{'RANK':>6} {'NODE':>5}  {'PHASE':<10} {'STEP':>9} {'IDLE S':>7}  NOTE"
        rows = [_row(rank, width, terminal) for rank in sorted(status.ranks, key=lambda r: r.rank)]
        return [terminal.paint(_cut(head, width), QUIET), *rows]
    return _nodes(status, width, room, terminal)


def _row(rank: pb.RankStatus, width: int, terminal: Terminal) -> str:
    phase = terminal.paint(f"{rank.phase:<10}", COLOURS[PHASE_TONES.get(rank.phase, "info")])
    rest = f" {rank.step:>9} {rank.idle_s:>7.1f}  {' '.join(rank.note.split())}"
    return f"{rank.rank:>6} {rank.node:>5}  {phase}{_cut(rest, width - 24).rstrip()}"


def _nodes(status: pb.JobStatus, width: int, room: int, terminal: Terminal) -> list[str]:
    phases: dict[int, Counter[str]] = {}
    for rank in status.ranks:
        phases.setdefault(rank.node, Counter())[rank.phase] += 1
    order = sorted(phases, key=lambda node: (set(phases[node]) == {"training"}, node))
    lines = [terminal.paint(_cut(f"{'NODE':>6}  RANKS", width), QUIET)]
    for node in order[: room - 2]:
        text = ", ".join(f"{count} {phase}" for phase, count in phases[node].most_common())
        tone = "good" if set(phases[node]) == {"training"} else "warn"
        lines.append(f"{node:>6}  {terminal.paint(_cut(text, width - 8), COLOURS[tone])}")
    left = len(order) - (room - 2)
    if left > 0:
        lines.append(f"        and {left} more nodes")
    return lines


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _cut(text: str, width: int) -> str:
    text = _printable(text)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
