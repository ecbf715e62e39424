"""The newest list of incidents is stored, however often the store fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from taskd.clusterd.records.journal_records import PastRound
from taskd.clusterd.records.packed_text import unpack
from taskd.core.record import StoreUnreachable
from taskd.manager.kept_incidents import MOST_BYTES, KeptIncidents, packed, with_rounds
from taskd.model.faults import Fault
from taskd.model.ids import Rank


def incident(number: int, *ranks: int, evidence: str = "") -> dict[str, Any]:
    faults = [{"rank": rank, "kind": "exited", "evidence": evidence} for rank in ranks]
    return {"incident": number, "because": "", "faults": faults}


def test_list_is_written_again_until_it_is_stored_and_never_after_a_newer_one() -> None:
    async def main() -> None:
        stored: list[list[int]] = []
        tried = asyncio.Event()

        async def write(value: bytes) -> None:
            if not tried.is_set():
                tried.set()
                raise StoreUnreachable("it does not answer in time")
            stored.append([one["incident"] for one in json.loads(unpack(value))])

        kept = KeptIncidents(write)
        kept.keep([incident(1)])
        await tried.wait()
        kept.keep([incident(1), incident(2)])
        await kept.close()
        assert stored == [[1, 2]]

    asyncio.run(main())


def test_long_lists_lose_evidence_before_they_lose_incidents() -> None:
    long = "".join(f"{number:x}" for number in range(100_000))
    value = packed([incident(number, 0, 1, evidence=long) for number in range(100)])
    assert len(value) <= MOST_BYTES
    shown = json.loads(unpack(value))
    assert [(one["incident"], len(one["faults"])) for one in shown] == [(n, 2) for n in range(100)]


def test_rounds_of_clusterd_add_what_no_manager_has_saved() -> None:
    fault = Fault(Rank(5), evidence="its agent has ended")
    rounds = (
        PastRound(3, 0.0, 1.0, "recover", "recovered", (fault,)),
        PastRound(2, 0.0, 1.0, "recover", "recovered", (fault,)),
        PastRound(1, 0.0, 1.0, "stress", "the test is over"),
    )
    merged = with_rounds([incident(2), incident(4, 1)], rounds)
    ranks = [(one["incident"], [fault["rank"] for fault in one["faults"]]) for one in merged]
    assert ranks == [(2, [5]), (3, [5]), (4, [1])]
