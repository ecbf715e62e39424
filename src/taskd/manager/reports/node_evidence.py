"""The newest facts of each node, and how the counters of its links have grown in the last minute.

Shown in incident reports and in the status; no decision depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from taskd.model.ids import NodeRank, Rank
from taskd.model.messages import NodeFacts

WINDOW_S = 60.0
MOST_COUNTERS = 512
"""Counters of one node that are kept; an agent sends far fewer."""
TEXT = 64

Counters = dict[tuple[str, str], int]
"""By link and counter."""


class NodeEvidence:
    def __init__(self) -> None:
        self.copies: dict[NodeRank, frozenset[Rank]] = {}
        """The ranks of whose state a copy lies in the memory of each node."""
        self._samples: dict[NodeRank, deque[tuple[float, Counters]]] = {}

    def take(self, node: NodeRank, facts: NodeFacts, now: float) -> None:
        self.copies[node] = frozenset(facts.copies)
        counters = {
            (each.link[:TEXT], each.counter[:TEXT]): each.value
            for each in facts.links[:MOST_COUNTERS]
        }
        samples = self._samples.setdefault(node, deque())
        samples.append((now, counters))
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()  # the oldest one that is kept was valid when the window began

    def changes(self) -> Iterator[tuple[NodeRank, str, str, int, int]]:
        """Node, link, counter, growth and total, of all counters that have grown."""
        for node, samples in sorted(self._samples.items()):
            before, after = samples[0][1], samples[-1][1]
            for (link, counter), total in sorted(after.items()):
                growth = total - before.get((link, counter), total)
                if growth > 0:
                    yield node, link, counter, growth, total


def nodes_with_copies(
    copies: Mapping[NodeRank, frozenset[Rank]], shards: Mapping[Rank, str]
) -> dict[str, set[NodeRank]]:
    """The nodes that keep a copy of each shard."""
    found: dict[str, set[NodeRank]] = {}
    for node, ranks in copies.items():
        for rank in ranks:
            if rank in shards:
                found.setdefault(shards[rank], set()).add(node)
    return found
