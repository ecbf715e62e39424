"""The manager's gRPC channel to clusterd. It follows certificates and tokens that are renewed.

After a failed call the certificates are read again (`bus/tls_files.py`), and a channel that has no
connection is replaced. The token file is read for each call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from taskd.bus.tls_files import TlsFiles
from taskd.manager.settings import ManagerConfig
from taskd.runtime.clock import monotonic
from taskd.runtime.tokens import ClientToken, bearer
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    # How long one attempt to connect may take. By default a host that is lost is tried for 20 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
)
REOPEN_S = 1.0
"""How old a channel without a connection must be before a new one replaces it."""

_RECOVER: Any = RecoverStub
_CONTROL: Any = ControlStub
_TRACE: Any = TrainingDataTraceStub


class ClusterdChannel:
    """The stubs of the current channel, and the metadata of a call."""

    def __init__(self, address: str, config: ManagerConfig) -> None:
        self._address, self._config = address, config
        self._files = TlsFiles.of(config.clusterd_tls)
        self._token = ClientToken(config.clusterd_token, config.clusterd_token_file)
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._opened_at = monotonic()
        self._channel = self._files.channel(self._address, OPTIONS)
        self.recover = _RECOVER(self._channel)
        self.control = _CONTROL(self._channel)
        self.trace = _TRACE(self._channel)

    async def close(self) -> None:
        await self._channel.close(None)
        await asyncio.gather(*self._closing)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """With the token of this moment."""
        return bearer(self._token.now())

    def renew(self) -> None:
        """After a failed call: use the certificates that have changed since, and try again soon.

        While clusterd is away, or its name has no address, the pauses of a channel grow up to two
        minutes. But another replica may lead a moment later.
        """
        if not self._files.are_renewed() and not self._waits_too_long():
            return
        old = self._channel
        self._open()
        # Calls that are under way may end. What is lost with a stream, clusterd repeats.
        closing = asyncio.create_task(old.close(self._config.rpc_timeout_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _waits_too_long(self) -> bool:
        state = self._channel.get_state()
        failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return failed and monotonic() - self._opened_at >= REOPEN_S
