"""A client of etcd with the few calls that TaskD needs.

Written here because the existing Python clients have no release in years, or neither asyncio nor
types. Each call has a time limit and is made once: only its caller knows whether it may be made
again. The first call after a failure goes to the next address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpc import aio

from taskd.bus.tls_files import TlsFiles
from taskd.clusterd.etcd.etcd_errors import (
    EtcdBusy,
    EtcdRefused,
    EtcdUnanswered,
    LeaseNotFound,
    SignInAgain,
    error_of,
)
from taskd.clusterd.etcd.etcd_settings import EtcdSettings, why_refused
from taskd.wire._pb import etcd_pb2 as pb
from taskd.wire._pb import etcd_pb2_grpc as services

OPTIONS = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

FOLLOW_S, MAX_FOLLOW_S = 0.5, 8.0
"""Time between two looks at etcd's members: at first, and later."""

_KV: Any = services.KVStub
_WATCH: Any = services.WatchStub
_LEASE: Any = services.LeaseStub
_CLUSTER: Any = services.ClusterStub
_MAINTENANCE: Any = services.MaintenanceStub
_AUTH: Any = services.AuthStub


@dataclass(frozen=True, slots=True)
class Found:
    """One key and its value."""

    key: str
    value: bytes
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Transaction:
    succeeded: bool
    """All comparisons held."""
    found: tuple[tuple[Found, ...], ...]
    """What each `get` of the branch that was taken has found."""
    revision: int


@dataclass(frozen=True, slots=True)
class Member:
    id: int
    name: str
    """Empty: it was added, and has not started yet."""
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...] = ()
    is_learner: bool = False


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What the member that answers knows, without asking the others."""

    cluster: int
    member: int
    leader: int
    """0: it knows none."""
    version: str
    db_bytes: int


def put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(key: str) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))


def get(key: str, *, prefix: bool = False) -> pb.RequestOp:
    end = _end(key) if prefix else b""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key.encode(), range_end=end))


def is_missing(key: str) -> pb.Compare:
    return pb.Compare(target=pb.Compare.CREATE, key=key.encode(), create_revision=0)


def is_at(key: str, mod_revision: int) -> pb.Compare:
    """The key was last changed in this revision; 0: it does not exist."""
    return pb.Compare(target=pb.Compare.MOD, key=key.encode(), mod_revision=mod_revision)


def has_value(key: str, value: bytes) -> pb.Compare:
    return pb.Compare(target=pb.Compare.VALUE, key=key.encode(), value=value)


class EtcdClient:
    def __init__(
        self, addresses: Sequence[str], settings: EtcdSettings | None = None, call_s: float = 1.0
    ) -> None:
        self._addresses, self._settings = tuple(addresses), settings or EtcdSettings()
        self._call_s = call_s
        self._at = 0
        self._channels: dict[str, aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._files: TlsFiles | None = None
        self._token = ""
        self._turn = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that are known now."""
        return self._addresses

    @property
    def address(self) -> str:
        """Where the next call goes."""
        return self._addresses[self._at % len(self._addresses)]

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
        await asyncio.gather(*self._closing)

    # Keys

    async def range(self, key: str, *, prefix: bool = False) -> tuple[Found, ...]:
        """A linearizable read."""
        end = _end(key) if prefix else b""
        request = pb.RangeRequest(key=key.encode(), range_end=end)
        return _found(await self._call(lambda channel: _KV(channel).Range, request))

    async def transact(
        self,
        compare: Sequence[pb.Compare],
        success: Sequence[pb.RequestOp],
        failure: Sequence[pb.RequestOp] = (),
    ) -> Transaction:
        """Raises LeaseNotFound if the lease of a `put` has ended."""
        request = pb.TxnRequest(compare=compare, success=success, failure=failure)
        answer = await self._call(lambda channel: _KV(channel).Txn, request)
        ranges = [one.response_range for one in answer.responses if one.HasField("response_range")]
        found = tuple(map(_found, ranges))
        return Transaction(answer.succeeded, found, answer.header.revision)

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        """Yields once when the watch is in place, and after each change of the key."""
        channel = await self._connect()
        address = self.address
        request = pb.WatchRequest(create_request=pb.WatchCreateRequest(key=key.encode()))
        stream = _WATCH(channel).Watch(metadata=self._metadata())
        try:
            await stream.write(request)
            async for answer in stream:
                if answer.canceled:
                    raise EtcdUnanswered(f"etcd at {address} ended the watch")
                if answer.created or answer.events:
                    yield None
        except aio.AioRpcError as error:
            raise error_of(error, address) from error
        finally:
            stream.cancel()

    # Leases

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        """The id of a new lease, and its length in seconds."""
        request = pb.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        answer = await self._call(lambda channel: _LEASE(channel).LeaseGrant, request)
        return answer.ID, float(answer.TTL)

    async def renew(self, lease: int) -> float:
        """The time that is left. Raises LeaseNotFound if the lease has ended."""
        request = pb.LeaseKeepAliveRequest(ID=lease)

        def method(channel: aio.Channel) -> Callable[..., Awaitable[Any]]:
            async def once(request: Any, **options: Any) -> Any:
                stub = _LEASE(channel)
                stream = stub.LeaseKeepAlive(**options)
                try:
                    await stream.write(request)
                    answer = await stream.read()
                    if not isinstance(answer, pb.LeaseKeepAliveResponse):
                        raise EtcdUnanswered(f"etcd at {self.address} ended the renewal")
                    return answer
                finally:
                    stream.cancel()

            return once

        answer = await self._call(method, request)
        if answer.TTL <= 0:
            raise LeaseNotFound(f"lease {lease:x} has ended")
        return float(answer.TTL)

    async def revoke(self, lease: int) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        await self._call(lambda channel: _LEASE(channel).LeaseRevoke, request)

    # Members

    async def members(self) -> tuple[Member, ...]:
        """As the member that answers knows them: this works without a quorum, too."""
        request = pb.MemberListRequest()
        answer = await self._call(lambda channel: _CLUSTER(channel).MemberList, request)
        return _members(answer.members)

    async def add_learner(self, peer_url: str) -> tuple[Member, ...]:
        """All members, with the new one. A learner has no vote: it cannot block the others."""
        request = pb.MemberAddRequest(peerURLs=[peer_url], isLearner=True)
        answer = await self._call(lambda channel: _CLUSTER(channel).MemberAdd, request)
        return _members(answer.members)

    async def remove_member(self, member: int) -> tuple[Member, ...]:
        request = pb.MemberRemoveRequest(ID=member)
        answer = await self._call(lambda channel: _CLUSTER(channel).MemberRemove, request)
        return _members(answer.members)

    async def promote_member(self, member: int) -> tuple[Member, ...]:
        """Give a learner its vote. Raises EtcdBusy as long as it lacks recent entries."""
        request = pb.MemberPromoteRequest(ID=member)
        answer = await self._call(lambda channel: _CLUSTER(channel).MemberPromote, request)
        return _members(answer.members)

    async def status(self) -> MemberStatus:
        answer = await self._call(lambda channel: _MAINTENANCE(channel).Status, pb.StatusRequest())
        header = answer.header
        return MemberStatus(
            header.cluster_id, header.member_id, answer.leader, answer.version, answer.dbSize
        )

    async def check_version(self) -> str:
        """The version of the member that answers. Raises EtcdRefused if it is not accepted."""
        version = (await self.status()).version
        if why := why_refused(version):
            raise EtcdRefused(f"{self.address}: {why}")
        return version

    # Calls

    async def _call(self, method: Callable[[aio.Channel], Any], request: Any) -> Any:
        try:
            return await self._once(method, request)
        except SignInAgain:
            self._token = ""
            return await self._once(method, request)

    async def _once(self, method: Callable[[aio.Channel], Any], request: Any) -> Any:
        channel = await self._connect()
        address = self.address
        try:
            call = method(channel)(request, timeout=self._call_s, metadata=self._metadata())
            # Not wait_for(): in Python 3.11 it loses a cancellation that comes with the answer.
            async with asyncio.timeout(2 * self._call_s):
                answer = await call
            self._follow_members()
            return answer
        except aio.AioRpcError as error:
            found = error_of(error, address)
            if isinstance(found, EtcdUnanswered):
                self._leave(address)
            raise found from error
        except TimeoutError as error:
            self._leave(address)
            raise EtcdUnanswered(f"etcd at {address} did not answer") from error

    async def _connect(self) -> aio.Channel:
        """The channel to the current address, signed in."""
        async with self._turn:
            address = self.address
            if address not in self._channels:
                self._files = self._files or self._settings.files()
                self._channels[address] = self._files.channel(address, OPTIONS)
            if self._settings.user and not self._token:
                self._token = await self._sign_in(self._channels[address])
            return self._channels[address]

    async def _sign_in(self, channel: aio.Channel) -> str:
        request = pb.AuthenticateRequest(name=self._settings.user, password=self._settings.password)
        address = self.address
        stub = _AUTH(channel)
        try:
            return str((await stub.Authenticate(request, timeout=self._call_s)).token)
        except aio.AioRpcError as error:
            if isinstance(found := error_of(error, address), EtcdUnanswered):
                self._leave(address)
            raise found from error

    def _follow_members(self) -> None:
        """Learn the members' addresses from now on: a client that only watches makes no calls."""
        if self._settings.follow_members and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        pause_s = FOLLOW_S
        while True:
            await self._look_for_members()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_FOLLOW_S)

    async def _look_for_members(self) -> None:
        with suppress(EtcdBusy, EtcdRefused, EtcdUnanswered):
            voters = [one for one in await self.members() if not one.is_learner]
            found = [url.partition("://")[2] for one in voters for url in one.client_urls]
            if found:
                at = self.address
                self._addresses = tuple(found)
                self._at = found.index(at) if at in found else 0

    def _leave(self, failed: str) -> None:
        """Unless another call has already left this address."""
        if failed == self.address:
            self._at += 1
            self._token = ""
        if self._files is not None and self._files.are_renewed():
            # Channels keep the certificates that they were opened with.
            for channel in self._channels.values():
                closing = asyncio.create_task(channel.close(self._call_s))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._channels.clear()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()


def _end(prefix: str) -> bytes:
    """The first key behind all keys with this prefix."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _found(answer: pb.RangeResponse) -> tuple[Found, ...]:
    return tuple(
        Found(one.key.decode(), bytes(one.value), one.mod_revision, one.lease) for one in answer.kvs
    )


def _members(found: Sequence[pb.Member]) -> tuple[Member, ...]:
    return tuple(
        Member(one.ID, one.name, tuple(one.peerURLs), tuple(one.clientURLs), one.isLearner)
        for one in found
    )
