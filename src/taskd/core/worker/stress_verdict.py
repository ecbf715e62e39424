"""The verdict of a stress test: which rank has failed, and why.

A wrong result is always a failure. Slowness is judged relative to the other ranks, because the
expected speed of a machine is unknown: a rank is slow when its best value is far below the median
of all best values. A bad link can be caused by either of its two ranks; the smallest set of ranks
that explains all bad links is named.

`torch/operations/device_tests.py` measures on the device. Every rank judges the same table and
reports its own result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from taskd.model.ids import Rank
from taskd.model.operations import FAULTY, PASSED, OpResult

ENOUGH_RANKS = 3
ENOUGH_LINKS = 3
"""With fewer values the median says nothing."""


@dataclass(frozen=True, slots=True)
class ComputeResult:
    """The matrix products of one rank: how many, how many were wrong, the best rate."""

    rank: Rank
    rounds: int
    wrong: int
    gflops: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One direction of a link: what arrived at `rank` from `peer`, and how fast."""

    rank: Rank
    peer: Rank
    wrong: int
    mb_s: float

    @property
    def link(self) -> tuple[Rank, Rank]:
        return min(self.rank, self.peer), max(self.rank, self.peer)

    def added_to(self, before: TransferResult | None) -> TransferResult:
        """Two measurements of one direction: the best rate, the sum of the errors."""
        if before is None:
            return self
        wrong, mb_s = before.wrong + self.wrong, max(before.mb_s, self.mb_s)
        return TransferResult(self.rank, self.peer, wrong, mb_s)


def judge_work(me: Rank, all_work: Iterable[ComputeResult], slow_factor: float) -> OpResult:
    """The verdict on one rank, given the results of all ranks that replied."""
    table = {work.rank: work for work in all_work}
    mine = table[me]
    text = f"{mine.rounds} products, {mine.gflops:.1f} GFLOP/s"
    if mine.wrong:
        return OpResult(FAULTY, f"{mine.wrong} of {mine.rounds} products were wrong")
    usual = median(work.gflops for work in table.values())
    if len(table) >= ENOUGH_RANKS and mine.gflops * slow_factor < usual:
        return OpResult(FAULTY, f"slow: {text}; the median is {usual:.1f}")
    return OpResult(PASSED, text)


def judge_links(me: Rank, seen: Sequence[TransferResult], slow_factor: float) -> OpResult:
    """The verdict on one rank, given the measurements of both ends of all links."""
    bad = bad_links(seen, slow_factor)
    mine = [one for one in seen if one.rank == me]
    if not mine:
        return OpResult(PASSED, "there is no peer to test with")
    slowest = min(mine, key=lambda one: one.mb_s)
    text = f"{len(mine)} links, the slowest to rank {slowest.peer} with {slowest.mb_s:.0f} MB/s"
    if me in culprits(bad, seen):
        why = "; ".join(why for link, why in sorted(bad.items()) if me in link)
        return OpResult(FAULTY, why)
    blamed = [link for link in bad if me in link]
    if blamed:
        return OpResult(PASSED, f"{text}; the other end of {_links(blamed)} is faulty")
    return OpResult(PASSED, text)


def bad_links(seen: Sequence[TransferResult], slow_factor: float) -> dict[tuple[Rank, Rank], str]:
    """Each bad link, and what is wrong with it."""
    wrong: dict[tuple[Rank, Rank], int] = {}
    slowest: dict[tuple[Rank, Rank], TransferResult] = {}
    for one in seen:
        wrong[one.link] = wrong.get(one.link, 0) + one.wrong
        slowest[one.link] = min(one, slowest.get(one.link, one), key=lambda way: way.mb_s)
    # Compare directions, not links: between two nodes only one direction may be slow, and yet
    # most links include it.
    usual = median(one.mb_s for one in seen) if seen else 0.0
    found = {}
    for link, way in slowest.items():
        if wrong[link]:
            found[link] = f"{_links([link])}: {wrong[link]} messages arrived damaged"
        elif len(slowest) >= ENOUGH_LINKS and way.mb_s * slow_factor < usual:
            rate = f"{way.mb_s:.0f} MB/s to rank {way.rank}; the median is {usual:.0f}"
            found[link] = f"{_links([link])}: {rate}"
    return found


def culprits(bad: Iterable[tuple[Rank, Rank]], seen: Sequence[TransferResult]) -> frozenset[Rank]:
    """The fewest ranks that explain all bad links; of two equal candidates the slower one."""
    left = set(bad)
    speed: dict[Rank, list[float]] = {}
    for one in seen:
        speed.setdefault(one.rank, []).append(one.mb_s)
    found = set()
    while left:
        counts: dict[Rank, int] = {}
        for link in left:
            for rank in link:
                counts[rank] = counts.get(rank, 0) + 1
        worst = min(counts, key=lambda rank: (-counts[rank], sum(speed.get(rank, [])), rank))
        found.add(worst)
        left = {link for link in left if worst not in link}
    return frozenset(found)


def pair_rounds(ranks: Sequence[Rank]) -> list[Mapping[Rank, Rank]]:
    """Every pair once, in rounds; in each round a rank has at most one partner."""
    places: list[Rank | None] = sorted(ranks)  # type: ignore[assignment]
    if len(places) % 2:
        places.append(None)
    rounds: list[Mapping[Rank, Rank]] = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        partners: dict[Rank, Rank] = {}
        for one, other in pairs:
            if one is not None and other is not None:
                partners[one], partners[other] = other, one
        rounds.append(partners)
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _links(links: Iterable[tuple[Rank, Rank]]) -> str:
    return ", ".join(f"link {a}-{b}" for a, b in sorted(links))
