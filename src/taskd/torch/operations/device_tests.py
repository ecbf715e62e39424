"""The operations of a stress test on PyTorch's devices: compute and links.

Compute: matrices of small integers are multiplied, so that every device must give the same bits in
any order of summation. The checksum of the correct product is a constant here, so that even the
host that computes the reference is checked. Links: every pair of ranks sends seeded bytes in both
directions over a separate group and compares what arrives.

`worker/operations/stress_order.py` calls these in a thread while the training thread is parked;
`core/worker/stress_verdict.py` judges the results. Nothing here draws from the script's random
numbers. On Ascend the vendor's own detection runs instead.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from taskd import config
from taskd.core.worker import stress_verdict as judge
from taskd.core.worker.stress_verdict import ComputeResult, TransferResult
from taskd.model.ids import Rank
from taskd.model.operations import COMPUTE, NOT_RUN, P2P, OpResult
from taskd.runtime.clock import monotonic
from taskd.torch.groups.store import Rendezvous
from taskd.torch.groups.transport import Shape, Transport
from taskd.wire.json_reading import loads
from taskd.worker.operations import ascend_calls as ascend
from taskd.worker.operations.stress_order import Operation, Request

SIZES = {"cpu": 384}
ACCELERATOR_SIZE = 2048
KNOWN = {(384, 7): 0x06A4F9C3, (2048, 7): 0xB5DC9066, (2048, 3): 0x3C63B8F4}
"""CRC-32 of the product as 32-bit integers, by the size of the matrix and the range of values."""
CASES = ((torch.float32, 7), (torch.float16, 3))
"""Data types, and how many different values are used so that all sums are exact. A CPU has no units
for the second."""
CHUNK = 16
"""Products per measurement on an accelerator. A CPU is measured after each product, so that its
best moment between other work is seen."""
PATIENCE_S = 20.0
"""How long to wait for the measurements of other ranks before judging without them."""
MB = 1024 * 1024
RETESTS = 2
"""How often a link that looks bad is tested again: on a busy machine all messages of one round may
have waited for a processor."""
INJECTED_DELAY_S = 0.25
"""Added to each message of a link that is made slow for a test."""

T = TypeVar("T", ComputeResult, TransferResult)


@dataclass(frozen=True, kw_only=True, slots=True)
class StressSettings:
    """Read from `TASKD_STRESS_*`."""

    compute_s: float = 10.0
    """How long each rank multiplies."""

    p2p_mb: int = 16
    """The size of one message between two ranks."""

    repeats: int = 4
    """How many messages cross each link in each direction; the fastest counts."""

    slow_factor: float = 4.0
    """How many times slower than the median of all ranks or links one may be."""

    inject: str = ""
    """For tests: `flip:RANK` changes a bit in a product of that rank, `slow:A-B` delays a link."""

    def __post_init__(self) -> None:
        for name in ("compute_s", "p2p_mb", "repeats"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.slow_factor <= 1:
            raise ValueError(f"slow_factor must be above 1, got {self.slow_factor}")


class StressTest:
    """One per process."""

    def __init__(
        self, settings: StressSettings, store: Callable[[], str], backends: dict[str, str]
    ) -> None:
        """`store`: host:port of the present one."""
        self._settings, self._store, self._backends = settings, store, backends
        local = int(config.environ.get("LOCAL_RANK", "0"))
        kind = "cuda" if "cuda" in backends and torch.cuda.is_available() else "cpu"
        self._device = torch.device(kind, local % torch.cuda.device_count() if kind != "cpu" else 0)

    def operations(self) -> dict[int, Operation]:
        if "npu" in self._backends and find_spec("torch_npu") is not None:
            return ascend.operations(ascend.TORCH)
        return {COMPUTE: self.compute, P2P: self.test_links}

    # Compute

    def compute(self, request: Request) -> OpResult:
        cases = CASES[:1] if self._device.type == "cpu" else CASES
        with torch.inference_mode():
            results = [self._multiply(request, *case, len(cases)) for case in cases]
        mine = ComputeResult(
            request.rank,
            sum(one.rounds for one in results),
            sum(one.wrong for one in results),
            results[0].gflops,
        )
        rendezvous = self._rendezvous(request, "compute")
        of_all = _exchange_results(request, rendezvous, mine, ComputeResult)
        return judge.judge_work(request.rank, of_all, self._settings.slow_factor)

    def _multiply(
        self, request: Request, kind: torch.dtype, spread: int, parts: int
    ) -> ComputeResult:
        size = SIZES.get(self._device.type, ACCELERATOR_SIZE)
        left, right, answer = matrices(size, spread)
        if checksum(answer) != KNOWN[size, spread]:
            return ComputeResult(request.rank, 1, 1, 0.0)
        a, b = (one.to(self._device, kind) for one in (left, right))
        expected = answer.to(self._device, kind)
        product = torch.empty_like(expected)
        wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        flip = self._settings.inject == f"flip:{request.rank}"
        rounds, best = 0, 0.0
        chunk = 1 if self._device.type == "cpu" else CHUNK
        until = monotonic() + self._settings.compute_s / parts
        while rounds < 2 * CHUNK or monotonic() < until:
            request.check()
            started = monotonic()
            for _ in range(chunk):
                torch.matmul(a, b, out=product)
                if flip and rounds == 0:
                    product.view(torch.int32)[7, 7] ^= 1 << 20
                wrong += (product != expected).any()
                rounds += 1
            self._wait_for_device()
            took = max(monotonic() - started, 1e-9)
            if rounds > CHUNK:  # the first ones warm up
                best = max(best, chunk * 2 * size**3 / took / 1e9)
        return ComputeResult(request.rank, rounds, int(wrong), best)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Links

    def test_links(self, request: Request) -> OpResult:
        rendezvous = self._rendezvous(request, "p2p")
        me, ranks = request.rank, request.ranks
        shape = Shape(
            "stress",
            tuple(ranks),
            ranks.index(me),
            timedelta(seconds=request.limit_s),
            self._backends,
        )
        transport = Transport(shape, rendezvous.store)
        request.on_stop(transport.abort)
        results: dict[Rank, TransferResult] = {}
        rounds = judge.pair_rounds(ranks)
        factor = self._settings.slow_factor
        try:
            transport.form()
            peers = [partners[me] for partners in rounds if me in partners]
            for turn in range(1 + RETESTS):
                for peer in peers:
                    request.check()
                    result = self._exchange(request, transport, peer)
                    results[peer] = result.added_to(results.get(peer))
                of_all = _exchange_results(
                    request, rendezvous, list(results.values()), TransferResult, turn
                )
                suspected = judge.bad_links(of_all, factor)
                peers = [peer for peer in peers if results[peer].link in suspected]
                if not suspected:
                    break
        except RuntimeError as error:
            request.check()
            return OpResult(NOT_RUN, f"the links could not be tested: {error}"[:500])
        finally:
            transport.discard(idle=not request.stopped.is_set())
        return judge.judge_links(me, of_all, factor)

    def _exchange(self, request: Request, transport: Transport, peer: Rank) -> TransferResult:
        """One direction after the other, so that they do not slow each other. Each is timed at the
        receiver; a token says when both are ready."""
        me, ranks = request.rank, request.ranks
        peer_place = ranks.index(peer)
        device = self._device if self._backends.get("cuda") == "nccl" else torch.device("cpu")
        mine = _payload(me, peer, self._settings.p2p_mb, device)
        expected = _payload(peer, me, self._settings.p2p_mb, device)
        got = torch.empty_like(expected)
        wrong, best = 0, 0.0
        slow = self._settings.inject == "slow:{}-{}".format(*sorted((me, peer)))
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        for _ in range(self._settings.repeats):
            request.check()
            got.zero_()
            for sends in (me < peer, me > peer):
                self._pass(transport, token, peer_place, not sends)  # both are ready now
                started = monotonic()
                if slow:
                    request.stopped.wait(INJECTED_DELAY_S)
                self._pass(transport, mine if sends else got, peer_place, sends)
                if not sends:
                    best = max(best, self._settings.p2p_mb / max(monotonic() - started, 1e-9))
            wrong += not torch.equal(got, expected)
        return TransferResult(me, peer, wrong, best)

    def _pass(self, transport: Transport, what: torch.Tensor, peer: int, sends: bool) -> None:
        inner: Any = transport.inner
        work = inner.send([what], peer, 0) if sends else inner.recv([what], peer, 0)
        work.wait()
        self._wait_for_device()

    def _rendezvous(self, request: Request, what: str) -> Rendezvous:
        timeout = timedelta(seconds=request.limit_s)
        rendezvous = Rendezvous(self._store(), f"stress/{request.uuid}/{what}/", timeout)
        request.on_stop(rendezvous.abort)
        return rendezvous


def _exchange_results(
    request: Request, rendezvous: Rendezvous, mine: T | list[T], kind: type[T], turn: int = 0
) -> list[T]:
    """The measurements of all ranks that have published theirs in time."""
    listed = mine if isinstance(mine, list) else [mine]
    store = rendezvous.store
    store.set(f"of/{turn}/{request.rank}", json.dumps([asdict(one) for one in listed]))
    keys = [f"of/{turn}/{rank}" for rank in request.ranks]
    try:
        store.wait(keys, timedelta(seconds=PATIENCE_S))
    except RuntimeError:
        request.check()
    published = (store.get(key) for key in keys if store.check([key]))
    return [kind(**item) for text in published for item in loads(text)]


def matrices(size: int, spread: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices of small integers and their product; all values are exact in any used type."""
    row = torch.arange(size, dtype=torch.int64).unsqueeze(1)
    column = torch.arange(size, dtype=torch.int64).unsqueeze(0)
    mixed = row * 7919 + column * 104729 + row * column * 31
    left = ((mixed * mixed) >> 5) % spread - spread // 2
    right = ((mixed * 65537 + 12345) >> 3) % spread - spread // 2
    answer = left.double() @ right.double()
    return left, right, answer


def checksum(answer: torch.Tensor) -> int:
    return zlib.crc32(answer.to(torch.int32).numpy().tobytes())


def _payload(sender: int, receiver: int, size_mb: int, device: torch.device) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(sender * 1_000_003 + receiver)
    whole = torch.randint(-(2**63), 2**63 - 1, (size_mb * MB // 8,), generator=seeded)
    return whole.view(torch.uint8).to(device)
