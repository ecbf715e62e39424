"""Immutable sets and tables of ranks in which changing one entry is cheap.

A job may have many thousand ranks, and each of them replies to every order: with frozenset and
dict each reply would copy all of them. A RankSet is the bits of one integer; a RankTable consists
of chunks, and a change copies one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from taskd.model.ids import Rank

V = TypeVar("V")
CHUNK_BITS = 6


class RankSet(Set[Rank]):
    __slots__ = ("_bits",)

    def __init__(self, ranks: Iterable[Rank] = ()) -> None:
        bits = 0
        for rank in ranks:
            bits |= 1 << rank
        self._bits = bits

    @classmethod
    def _of(cls, bits: int) -> RankSet:
        made = cls()
        made._bits = bits
        return made

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self._bits >> rank & 1)

    def __iter__(self) -> Iterator[Rank]:
        """In ascending order."""
        bits = self._bits
        while bits:
            lowest = bits & -bits
            yield Rank(lowest.bit_length() - 1)
            bits ^= lowest

    def from_rank(self, rank: Rank) -> RankSet:
        """The ranks that are not below this one."""
        return RankSet._of(self._bits >> rank << rank)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __and__(self, other: Iterable[object]) -> RankSet:
        return RankSet._of(self._bits & _bits(other))

    def __or__(self, other: Iterable[Any]) -> RankSet:
        return RankSet._of(self._bits | _bits(other))

    def __sub__(self, other: Iterable[object]) -> RankSet:
        return RankSet._of(self._bits & ~_bits(other))

    def __le__(self, other: Set[Any]) -> bool:
        return not self._bits & ~_bits(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Set) and self._bits == _bits(other)

    def __hash__(self) -> int:
        return hash(self._bits)

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"


NO_RANKS = RankSet()


def _bits(ranks: Iterable[Any]) -> int:
    return ranks._bits if isinstance(ranks, RankSet) else RankSet(ranks)._bits


class RankTable(Mapping[Rank, V]):
    __slots__ = ("_chunks", "_count")

    def __init__(self, items: Mapping[Rank, V] | None = None) -> None:
        self._chunks: dict[int, dict[Rank, V]] = {}
        for rank, value in (items or {}).items():
            self._chunks.setdefault(rank >> CHUNK_BITS, {})[rank] = value
        self._count = sum(map(len, self._chunks.values()))

    def put(self, rank: Rank, value: V) -> RankTable[V]:
        """The same table with one entry added or changed."""
        return self.update({rank: value})

    def update(self, items: Mapping[Rank, V]) -> RankTable[V]:
        chunks, fresh, count = dict(self._chunks), set[int](), self._count
        for rank, value in items.items():
            number = rank >> CHUNK_BITS
            if number not in fresh:
                fresh.add(number)
                chunks[number] = dict(chunks.get(number, {}))
            count += rank not in chunks[number]
            chunks[number][rank] = value
        made = RankTable[V]()
        made._chunks, made._count = chunks, count
        return made

    def __getitem__(self, rank: Rank) -> V:
        return self._chunks[rank >> CHUNK_BITS][rank]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank in self._chunks.get(rank >> CHUNK_BITS, ())

    def __iter__(self) -> Iterator[Rank]:
        for chunk in self._chunks.values():
            yield from chunk

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Table({dict(self)})"
