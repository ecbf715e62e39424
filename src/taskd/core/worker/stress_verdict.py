"""What the measurements of a stress test mean: which rank has failed, and in which words.

A wrong answer is wrong by itself. Slowness is judged against the others, since nobody knows what
this machine should do: a rank is slow when its best is far behind the median of all bests. Of a
bad link two ranks could be the cause; the fewest ranks that explain all bad links are named.

`torch/operations/device_tests.py` measures on the device; every rank judges the same table and
reports itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from taskd.model.ids import Rank
from taskd.model.operations import FAULTY, PASSED, OpResult

ENOUGH_RANKS = 3
ENOUGH_LINKS = 3
"""With fewer there is no median to be behind of."""


@dataclass(frozen=True, slots=True)
class ComputeResult:
    """One rank's products: how many, how many of them were wrong, the best rate."""

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
        """Both turns of the same direction: its best, and all that was wrong."""
        if before is None:
            return self
        wrong, mb_s = before.wrong + self.wrong, max(before.mb_s, self.mb_s)
        return TransferResult(self.rank, self.peer, wrong, mb_s)


def judge_work(me: Rank, all_work: Iterable[ComputeResult], slow_factor: float) -> OpResult:
    """The verdict on one rank, given what all ranks that answered have done."""
    table = {work.rank: work for work in all_work}
    mine = table[me]
    told = f"{mine.rounds} products, {mine.gflops:.1f} GFLOP/s"
    if mine.wrong:
        return OpResult(FAULTY, f"{mine.wrong} of {mine.rounds} products were wrong")
    usual = median(work.gflops for work in table.values())
    if len(table) >= ENOUGH_RANKS and mine.gflops * slow_factor < usual:
        return OpResult(FAULTY, f"slow: {told}, where {usual:.1f} is usual")
    return OpResult(PASSED, told)


def judge_links(me: Rank, seen: Sequence[TransferResult], slow_factor: float) -> OpResult:
    """The verdict on one rank, given all links as both ends have seen them."""
    bad = bad_links(seen, slow_factor)
    mine = [one for one in seen if one.rank == me]
    if not mine:
        return OpResult(PASSED, "no peer to cross to")
    slowest = min(mine, key=lambda one: one.mb_s)
    told = f"{len(mine)} links, the slowest to rank {slowest.peer} with {slowest.mb_s:.0f} MB/s"
    if me in culprits(bad, seen):
        why = "; ".join(why for link, why in sorted(bad.items()) if me in link)
        return OpResult(FAULTY, why)
    blamed = [link for link in bad if me in link]
    if blamed:
        return OpResult(PASSED, f"{told}; the other end of {_links(blamed)} is to blame")
    return OpResult(PASSED, told)


def bad_links(seen: Sequence[TransferResult], slow_factor: float) -> dict[tuple[Rank, Rank], str]:
    """Each bad link, and what is wrong with it."""
    wrong: dict[tuple[Rank, Rank], int] = {}
    slowest: dict[tuple[Rank, Rank], TransferResult] = {}
    for one in seen:
        wrong[one.link] = wrong.get(one.link, 0) + one.wrong
        slowest[one.link] = min(one, slowest.get(one.link, one), key=lambda way: way.mb_s)
    # Directions are compared, not links: between two nodes there may be one slow direction only,
    # and yet most links have it.
    usual = median(one.mb_s for one in seen) if seen else 0.0
    found = {}
    for link, way in slowest.items():
        if wrong[link]:
            found[link] = f"{_links([link])}: {wrong[link]} messages arrived damaged"
        elif len(slowest) >= ENOUGH_LINKS and way.mb_s * slow_factor < usual:
            told = f"{way.mb_s:.0f} MB/s towards rank {way.rank}, where {usual:.0f} is usual"
            found[link] = f"{_links([link])}: {told}"
    return found


def culprits(bad: Iterable[tuple[Rank, Rank]], seen: Sequence[TransferResult]) -> frozenset[Rank]:
    """The fewest ranks that explain all bad links; of two alike, the one that is slower at all."""
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
    """Every pair once, in rounds in which each rank has at most one partner."""
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
