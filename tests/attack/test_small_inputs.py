"""Random bytes in the small formats that processes of a node exchange: no crash, no surprise."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.agent.zygote import protocol
from taskd.core.bus.delivery import ProtocolError
from taskd.runtime import beacon
from taskd.torch.copies import snapshot_file
from taskd.torch.copies.snapshot_file import MAGIC as SNAPSHOT
from taskd.wire import bus_frames

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
packets = st.binary(max_size=300) | st.builds(
    lambda kind, fields: json.dumps({"kind": kind, **fields}).encode(),
    st.sampled_from([*protocol._KINDS, "x", "__class__"]),
    st.dictionaries(st.sampled_from(["id", "name", "env", "port", "host", "x"]), json_values),
)


@settings(max_examples=500)
@given(packets)
def test_zygote_gets_a_message_or_a_reason(packet: bytes) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(here, [packet or b" "], [file.fileno()])
        try:
            received = protocol.read(there)
        except protocol.BadMessage:
            assert len(os.listdir("/proc/self/fd")) == before, "a file of the message stays open"
            return
        assert received is not None
        for one in received[1]:
            os.close(one)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


frames = st.binary(max_size=300) | st.lists(
    st.builds(field, st.integers(1, 15), st.binary(max_size=100)), max_size=20
).map(b"".join)


@settings(max_examples=1000)
@given(frames, st.integers(0, 400), st.booleans())
def test_frame_of_the_bus_is_read_or_refused(raw: bytes, counted: int, many: bool) -> None:
    """Also where its parts are counted first: both ways see the same frame."""
    limits: Any = bus_frames
    before = limits.COUNTED_BYTES, limits.MOST_PARTS
    limits.COUNTED_BYTES, limits.MOST_PARTS = counted, 3 if many else 4096
    try:
        frame = bus_frames.frame_from_bytes(raw)
    except ProtocolError:
        return
    finally:
        limits.COUNTED_BYTES, limits.MOST_PARTS = before
    assert len(frame.parcels) + len(frame.receipts) <= (3 if many else 4096)


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_snapshot_file_is_complete_or_ignored(content: bytes, begins_well: bool) -> None:
    """Such a file may come from a crashed rank, or from another node."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack("<Q", SNAPSHOT) + content if begins_well else content)
        file.flush()
        found = snapshot_file.inspect(Path(file.name))
        size = os.fstat(file.fileno()).st_size
    assert found is None or found.length + snapshot_file.HEAD <= size


@settings(max_examples=1000)
@given(st.binary(max_size=96) | st.builds(lambda rest: page(rest), st.binary(min_size=64)))
def test_beacon_is_valid_or_ignored(content: bytes) -> None:
    seen = beacon.read(content)
    if seen is not None:
        assert math.isfinite(seen.moved_at)
        assert seen.phase in beacon.PHASES
        assert min(seen.step, seen.entered, seen.ended, seen.incident, seen.pid) >= 0
        assert max(seen.step, seen.incident, seen.pid) < 2**63


def page(rest: bytes) -> bytes:
    return struct.pack("<Q", beacon.MAGIC) + rest[:64]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_beacon_with_an_impossible_time_is_ignored(value: float) -> None:
    content: Any = struct.pack("<QQQQQdQQQ", beacon.MAGIC, 1, 1, 1, 1, value, 1, 1, 1)
    assert beacon.read(content) is None
