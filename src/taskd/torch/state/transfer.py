"""Moves the whole training state from one rank to another, and refuses what does not match.

Every image carries its step, incident and keyed digests of all bytes; only over a local connection
(`local_link.py`) an image may come without digests. A rank that holds a state worth keeping
receives the new one into new tensors and replaces its own only when all of it has arrived and fits;
a replacement, which holds nothing, receives in place. `apply_plan.py` decides which rank sends to
which.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from typing import Any

import torch

from taskd.torch import compat
from taskd.torch.state import pieces
from taskd.torch.state.keyed_digest import digest, digests
from taskd.torch.state.pieces import Key, optimized, raw_bytes
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import DIGEST, BadState, key_for, seal, unseal
from taskd.torch.state.sharded import is_distributed, local
from taskd.torch.state.state_link import Receive, Send

MAX_MANIFEST_BYTES = 2**32
"""A longer manifest cannot be one rank's state."""
PLACE = "manifest of a state"
MOST_VERIFIERS = 2
"""More do not help: they would wait for memory."""

Mark = tuple[int, int]
"""The address of a tensor, and how often it was changed in place."""
Written = dict[tuple[int, int], tuple[Mark, bytes]]
"""The tensors in a file that need not be written again, by place and size: the mark and the digest
that each had when it was written."""
Fetch = Callable[[int, Callable[[Receive], None]], None]
"""Gets the number of a share: connects to the helper that sends it and reads what it sends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the state."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    """It is the local part of a distributed tensor."""
    on_host: bool
    """An optimizer may keep its counters in host memory, or with the weights."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an image holds. Small values are in it, the tensors follow."""

    step: int
    incident: int
    shard: str
    pieces: tuple[Piece, ...]
    digests: tuple[bytes, ...]
    """One of each piece, with the job's key; none in an image for local connections."""
    plain: dict[str, Any]
    """Everything that is not a tensor."""
    own: bool = False
    """It is what only one rank has."""


# Sending


class StateImage:
    """The state of one step, ready to be sent to any number of receivers.

    Created in the training thread, at once: it refers to weights and optimizer state, which do not
    change until the next update, and copies all that a forward pass may change. `seal` does the
    long part, the digests, in any thread, and on the device where the state is.
    """

    def __init__(
        self,
        protected: Protected,
        step: int,
        incident: int,
        shard: str,
        *,
        own: bool = False,
        gradients: bool = False,
        parts: dict[str, Any] | None = None,
    ) -> None:
        """`own`: only what belongs to this rank alone, as it is at this moment; with `gradients`,
        those that the step leaves to the next one belong to it. `parts`: the parts of it, if their
        states are known."""
        if own:
            tensors = pieces.own_tensors(protected, step, gradients)
            if parts is None:
                parts = pieces.own_part_states(protected, step)
            plain: dict[str, Any] = {"parts": parts}
        else:
            tensors = pieces.shared_tensors(protected, step)
            plain = pieces.plain_state(protected, pieces.shared_part_states(protected, step))
            plain["names"] = pieces.optimizer_names(protected)
        plain["turn"] = pieces.turn_states(protected, step, own=own)
        self._tensors: list[torch.Tensor] = []
        self._marks: dict[int, Mark] = {}
        """Of tensors that training does not change."""
        frozen = frozenset() if own else pieces.frozen(protected)
        described: list[Piece] = []
        for key, tensor in tensors:
            mine = local(tensor)
            if key in frozen:
                self._marks[len(described)] = mine.data_ptr(), compat.version_of(tensor)
            self._tensors.append(mine.clone() if key[0] == "buffer" else mine)
            on_host = mine.device.type == "cpu"
            shape = tuple(mine.shape)
            described.append(Piece(key, shape, mine.dtype, is_distributed(tensor), on_host))
        if described:
            plain = pickle.loads(pickle.dumps(plain))
        self._draft = Manifest(step, incident, shard, tuple(described), (), plain, own)
        self._sealed = b""
        self._digests: tuple[bytes, ...] = ()
        self._once = threading.Lock()
        self._side = _SideStream(self._tensors)
        if not described:
            self.seal()  # nothing in it takes long

    def seal(self) -> None:
        """Compute the digests. Does nothing the second time."""
        with self._once:
            if self._sealed:
                return
            manifest = self._draft
            if self._tensors:
                with self._side.work():
                    self._tensors = [raw_bytes(tensor) for tensor in self._tensors]
                    self._digests = digests(self._tensors, key_for(PLACE))
                manifest = replace(manifest, digests=self._digests)
            self._sealed = seal(manifest, PLACE)

    @property
    def is_own(self) -> bool:
        """It is what only this rank has."""
        return self._draft.own

    @property
    def on_device(self) -> bool:
        """Some of it is not in host memory."""
        return self._side.is_needed

    @property
    def head(self) -> bytes | None:
        """All of it, where it has no tensors."""
        return None if self._tensors else self._head()

    @property
    def length(self) -> int:
        """In bytes, once sealed."""
        return 8 + len(self._sealed) + sum(tensor.numel() for tensor in self._tensors)

    def is_shared_by(self, senders: int) -> bool:
        """Whether that many would each send a part of it."""
        return len(split(self._draft.pieces, senders)) > 1

    def send(self, send: Send, senders: int = 1, share: int = 0, *, bare: bool = False) -> None:
        """Send all of it, or one of several senders' shares. The first sends the manifest too,
        without digests if `bare`."""
        if share == 0:
            if not bare:
                self.seal()
            head = _with_length(seal(self._draft, PLACE)) if bare else self._head()
            send(memoryview(head))
        with self._side.work():
            for index in split(self._draft.pieces, senders)[share]:
                if self._tensors[index].numel():
                    send(raw_bytes(self._tensors[index]).cpu().numpy().data)

    def write_into(self, target: torch.Tensor, written: Written) -> Written:
        """Write what `send` would send into these bytes: by the device itself, where it can.

        `written`: what an earlier call has written there. Frozen weights are not written again at
        the same place. Returns the same for the next call.
        """
        self.seal()
        head = self._head()
        at = len(head)
        target[:at] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        frozen: Written = {}
        with self._side.work():
            for index, tensor in enumerate(self._tensors):
                place = at, tensor.numel()
                if index in self._marks:
                    frozen[place] = self._marks[index], self._digests[index]
                if place not in frozen or written.get(place) != frozen[place]:
                    target[at : at + tensor.numel()].copy_(tensor, non_blocking=True)
                at += tensor.numel()
        return frozen

    def _head(self) -> bytes:
        return _with_length(self._sealed)


def _with_length(sealed: bytes) -> bytes:
    return len(sealed).to_bytes(8, "little") + sealed


def split(described: Sequence[Piece], senders: int) -> list[range]:
    """Which pieces each sender sends: about equal shares, or one share if the state is small."""
    total = sum(piece.size for piece in described)
    if senders < 2 or total < pieces.MULTI_SENDER_BYTES:
        return [range(len(described))]
    ends, at, size = [], 0, 0
    for share in range(1, senders):
        while at < len(described) and size < total * share / senders:
            size += described[at].size
            at += 1
        ends.append(at)
    starts = [0, *ends]
    return [range(*both) for both in zip(starts, [*ends, len(described)], strict=True)]


class _SideStream:
    """Work on tensors beside training: on a device, in a separate stream.

    A copy of the state must not wait for the kernels of the next step, nor they for it. The stream
    starts after everything that was queued on the devices when it was created, in the training
    thread; the work may be done in any thread.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams = [_stream_after(one) for one in {t.device for t in tensors if t.is_cuda}]

    @property
    def is_needed(self) -> bool:
        """Whether any tensor is on a device."""
        return bool(self._streams)

    @contextmanager
    def work(self) -> Iterator[None]:
        """On exit, all work of the block is done."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams:
                stream.synchronize()


def _stream_after(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


# Receiving


def receive_state(
    protected: Protected,
    step: int,
    incident: int,
    shard: str,
    receive: Receive,
    keep_own: bool,
    helpers: Sequence[Fetch] = (),
    *,
    may_be_bare: bool = False,
) -> None:
    """Receive that state, or raise; with `keep_own`, the own state is then unchanged.

    A copy may be of an earlier incident than the one that it is requested in, never of a later one.
    `helpers` send their shares of a large state while the first sender's comes in. An image without
    digests is refused unless it `may_be_bare`: all of it comes over local connections.
    """
    manifest = _read_manifest(receive, may_be_bare)
    if (manifest.step, manifest.shard) != (step, shard) or manifest.incident > incident:
        raise BadState(
            f"expected step {step} of shard {shard!r} in incident {incident}, got step "
            f"{manifest.step} of shard {manifest.shard!r} in incident {manifest.incident}"
        )
    missing = protected.parts.keys() - manifest.plain["parts"].keys() - protected.own_parts(step)
    if missing and not manifest.own:
        raise BadState(f"the state of {', '.join(sorted(missing))} is missing")
    targets = _targets(protected, manifest, keep_own or manifest.own)
    shares = split(manifest.pieces, 1 + len(helpers))
    if len(shares) > 1 and len(manifest.digests) != len(manifest.pieces):
        raise BadState("a state that several ranks send has no digests")

    with (
        ThreadPoolExecutor(max(1, len(shares) - 1)) as pool,
        ThreadPoolExecutor(max(len(shares), _verifiers())) as verifiers,
    ):
        verified: list[Future[None]] = []

        def read(share: range, source: Receive) -> None:
            """Each piece is verified while the next one arrives."""
            for index in share:
                _read_tensor(targets[index], source)
                if manifest.digests:
                    verified.append(verifiers.submit(_verify, targets[index], manifest, index))

        fetched = [
            pool.submit(fetch, number, partial(read, share))
            for number, (fetch, share) in enumerate(zip(helpers, shares[1:], strict=False), 1)
        ]
        read(shares[0], receive)
        for one in (*fetched, *verified):
            one.result()
    _load_any(protected, manifest, targets)


def _verifiers() -> int:
    """Threads that compute digests, if cores are free: the loopback is faster than one of them."""
    return max(1, min(MOST_VERIFIERS, len(os.sched_getaffinity(0)) // 2))


def load(protected: Protected, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
    """Load an image that was unpacked before, or raise BadState if it does not fit."""
    targets = _targets(protected, manifest, keep_own=True)
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)
    _load_any(protected, manifest, targets)


def verify(receive: Receive) -> None:
    """Read an image and discard it; raise BadState if it is damaged."""
    for _ in unpack(receive)[1]:
        pass


def unpack(receive: Receive) -> tuple[Manifest, Iterator[tuple[Piece, torch.Tensor]]]:
    """The contents of any rank's image. The tensors come one by one, until one is damaged."""
    manifest = _read_manifest(receive)
    return manifest, _unpacked(manifest, receive)


def _unpacked(manifest: Manifest, receive: Receive) -> Iterator[tuple[Piece, torch.Tensor]]:
    for index, piece in enumerate(manifest.pieces):
        target = torch.empty(piece.shape, dtype=piece.dtype)
        _read_tensor(target, receive)
        _verify(target, manifest, index)
        yield piece, target


def _read_manifest(receive: Receive, may_be_bare: bool = False) -> Manifest:
    head = bytearray(8)
    receive(memoryview(head))
    length = int.from_bytes(head, "little")
    if not DIGEST < length <= MAX_MANIFEST_BYTES:
        raise BadState(
            f"invalid manifest: its length is {length} bytes, expected more than {DIGEST} and at "
            f"most {MAX_MANIFEST_BYTES}"
        )
    sealed = bytearray(length)
    receive(memoryview(sealed))
    manifest: Manifest = unseal(sealed, PLACE)
    is_bare = may_be_bare and not manifest.digests
    if len(manifest.digests) != len(manifest.pieces) and not is_bare:
        raise BadState(
            f"the state has {len(manifest.digests)} digests for {len(manifest.pieces)} tensors, "
            "and it was not received over a local connection"
        )
    return manifest


@torch.no_grad()
def _read_tensor(target: torch.Tensor, receive: Receive) -> None:
    if not target.numel():
        return
    if target.is_contiguous() and target.device.type == "cpu":
        receive(raw_bytes(target).numpy().data)
        return
    staging = torch.empty(target.shape, dtype=target.dtype)
    receive(raw_bytes(staging).numpy().data)
    target.copy_(staging)


def _verify(target: torch.Tensor, manifest: Manifest, index: int) -> None:
    if not compare_digest(digest(raw_bytes(target), key_for(PLACE)), manifest.digests[index]):
        raise BadState(f"the digest of {manifest.pieces[index].key} does not match")


def _targets(protected: Protected, manifest: Manifest, keep_own: bool) -> list[torch.Tensor]:
    """Where each piece is received: into our own tensor, or into a new one."""
    own = {key: local(tensor) for key, tensor in pieces.tensors(protected)}
    targets = []
    for piece in manifest.pieces:
        mine = own.get(piece.key)
        fits = mine is not None and (tuple(mine.shape), mine.dtype) == (piece.shape, piece.dtype)
        if piece.key[0] in ("parameter", "buffer") and not fits:
            raise BadState(f"{piece.key} has another shape on this rank: the models differ")
        if mine is not None and fits and not keep_own:
            targets.append(mine)
        else:
            device = _device_for(protected, piece) if mine is None else mine.device
            targets.append(torch.empty(piece.shape, dtype=piece.dtype, device=device))
    return targets


def _device_for(protected: Protected, piece: Piece) -> torch.device:
    """Where a new tensor of an optimizer, or a gradient, belongs."""
    if piece.on_host:
        return torch.device("cpu")
    if piece.key[0] == "gradient":
        return local(protected.parameters[piece.key[1]]).device
    return local(optimized(protected)[piece.key[1]][1]).device


def _load_any(protected: Protected, manifest: Manifest, received: list[torch.Tensor]) -> None:
    if manifest.own:
        _load_own(protected, manifest, received)
    else:
        _load(protected, manifest, received)


@torch.no_grad()
def _load(protected: Protected, manifest: Manifest, received: list[torch.Tensor]) -> None:
    """Make the received state our own."""
    protected.step = None
    own = dict(pieces.tensors(protected))
    parameters = optimized(protected)
    fresh: dict[int, dict[str, Any]] = {}
    for piece, tensor in zip(manifest.pieces, received, strict=True):
        kind, index, name = piece.key
        if kind == "optimizer":
            if index >= len(parameters):
                raise BadState("the sender's optimizer has parameters that this rank's has not")
            parameter = parameters[index][1]
            value = _distributed_like(parameter, tensor) if piece.sharded else tensor
            fresh.setdefault(index, {})[name] = value
        elif (mine := local(own[piece.key])) is not tensor:
            mine.copy_(tensor)
    for index, values in manifest.plain["optimizer"].items():
        fresh.setdefault(index, {}).update(values)
    for index, names in manifest.plain["names"].items():
        fresh[index] = {name: fresh[index][name] for name in names}
    for index, (optimizer, parameter) in enumerate(parameters):
        if index in fresh:
            optimizer.state[parameter] = fresh[index]
        else:
            optimizer.state.pop(parameter, None)
    pieces.load_plain_state(protected, manifest.plain)
    protected.record_parts()
    protected.received_turn = dict(manifest.plain["turn"])
    protected.has_left_gradients = False
    protected.step = manifest.step


@torch.no_grad()
def _load_own(protected: Protected, manifest: Manifest, received: list[torch.Tensor]) -> None:
    """The rest of the state, after that of the shard: what only this rank has."""
    before, protected.step = protected.step, None
    buffers = protected.buffers()
    for parameter in protected.parameters:
        parameter.grad = None
    for piece, tensor in zip(manifest.pieces, received, strict=True):
        kind, index, _ = piece.key
        if kind == "buffer":
            buffers[index].copy_(tensor)
        else:
            parameter = protected.parameters[index]
            parameter.grad = _distributed_like(parameter, tensor) if piece.sharded else tensor
    protected.has_left_gradients = any(one.key[0] == "gradient" for one in manifest.pieces)
    pieces.load_parts(protected, manifest.plain["parts"])
    protected.record_parts()
    protected.received_turn |= manifest.plain["turn"]
    protected.step = before


def _distributed_like(parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
