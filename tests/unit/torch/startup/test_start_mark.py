"""Who starts together with the others, and who joins a job that runs."""

from __future__ import annotations

from torch.distributed import Store, TCPStore

from taskd.torch.startup.start_mark import StartMark


def test_job_runs_when_the_last_rank_has_arrived() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [StartMark(f"127.0.0.1:{store.port}", "0") for _ in range(3)]
    for rank, mark in enumerate(ranks):
        assert not mark.is_set(is_expected=False), "a slow rank starts together with the others"
        mark.arrive(rank, len(ranks))
    assert all(mark.is_set(is_expected=False) for mark in ranks)


def test_rank_that_starts_twice_counts_once() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mark = StartMark(f"127.0.0.1:{store.port}", "0")
    mark.arrive(0, 2)
    mark.arrive(0, 2)
    assert not mark.is_set(is_expected=False)
    assert not StartMark(f"127.0.0.1:{store.port}", "1").is_set(is_expected=False)
    mark.arrive(1, 2)
    assert mark.is_set(is_expected=False)


def test_new_store_at_the_old_address_gets_the_mark_and_what_ranks_keep() -> None:
    """The launcher of the store's node was killed and started again."""
    lost = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address, port = f"127.0.0.1:{lost.port}", lost.port
    survivors = [StartMark(address, "0") for _ in range(2)]
    for rank, mark in enumerate(survivors):
        mark.publish = lambda store, rank=rank: store.set(f"kept by {rank}", "1")  # type: ignore[misc]
        mark.arrive(rank, len(survivors))
    assert not any(mark.meet_at(address) for mark in survivors), "it is the same store"
    del lost
    found: Store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    replacement = StartMark(address, "0")
    assert not replacement.is_set(is_expected=False)
    for mark in survivors:
        assert mark.meet_at(address)
    assert replacement.is_set(is_expected=True)
    assert replacement.store.check(["kept by 0", "kept by 1"])
    del found
