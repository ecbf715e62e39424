"""Messages, receipts and frames of the bus <-> their protobuf forms."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from taskd.core.bus.delivery import Frame, Hello, ProtocolError
from taskd.model.bus import Parcel, Receipt
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.wire._pb import link_pb2, tasknet_pb2
from taskd.wire.request_weight import read_varint

MOST_PARTS = 4096
"""Messages and acks in one frame; our own processes send at most 1024."""
COUNTED_BYTES = 128 << 10
"""From this size on the parts are counted before they are parsed: an empty one has two bytes on the
wire, and a hundred times as many in memory."""
DEFAULT_PATIENCE_S = 3.0
"""How long one of Ascend's processes waits for a receipt; its messages do not say."""


def position_to_pb(position: Position) -> tasknet_pb2.Position:
    return tasknet_pb2.Position(
        role=position.role,
        serverRank=position.server_rank,
        processRank=position.process_rank,
    )


def position_from_pb(pb: tasknet_pb2.Position) -> Position:
    return Position(pb.role, pb.serverRank, pb.processRank)


def message_to_pb(parcel: Parcel) -> tasknet_pb2.Message:
    return tasknet_pb2.Message(
        header=tasknet_pb2.MessageHeader(
            uuid=parcel.uuid,
            mtype=parcel.mtype,
            sync=parcel.sync,
            src=position_to_pb(parcel.src),
            dst=position_to_pb(parcel.dst),
        ),
        body=parcel.body,
    )


def message_from_pb(
    pb: tasknet_pb2.Message, patience_s: float = DEFAULT_PATIENCE_S
) -> Parcel | NetCode:
    """The message, or the code of the field that is missing."""
    if not pb.HasField("header"):
        return NetCode.NilHeader if pb.body else NetCode.NilMessage
    header = pb.header
    if not header.HasField("src") or not header.HasField("dst"):
        return NetCode.NilPosition
    return Parcel(
        header.uuid,
        header.mtype,
        header.sync,
        position_from_pb(header.src),
        position_from_pb(header.dst),
        pb.body,
        patience_s,
    )


def receipt_to_pb(receipt: Receipt) -> tasknet_pb2.Ack:
    src = None if receipt.src is None else position_to_pb(receipt.src)
    return tasknet_pb2.Ack(uuid=receipt.uuid, code=receipt.code, src=src)


def receipt_from_pb(pb: tasknet_pb2.Ack) -> Receipt:
    src = position_from_pb(pb.src) if pb.HasField("src") else None
    return Receipt(pb.uuid, pb.code, src)


def frame_to_pb(frame: Frame) -> link_pb2.Frame:
    hello = frame.hello
    return link_pb2.Frame(
        first=frame.first,
        messages=[message_to_pb(parcel) for parcel in frame.parcels],
        acks=[receipt_to_pb(receipt) for receipt in frame.receipts],
        received=frame.received,
        hello=None
        if hello is None
        else link_pb2.Hello(incarnation=hello.incarnation, peer_incarnation=hello.peer_incarnation),
        patience_ms=[
            round(parcel.patience_s * 1000) if parcel.sync else 0 for parcel in frame.parcels
        ],
    )


def frame_from_bytes(raw: bytes) -> Frame:
    """Raises `ProtocolError` also for what cannot be parsed, and for a frame of too many parts."""
    if len(raw) > COUNTED_BYTES and _has_more_fields(raw, MOST_PARTS):
        raise ProtocolError(f"a frame has more than {MOST_PARTS} parts")
    try:
        pb = link_pb2.Frame.FromString(raw)
    except (DecodeError, ValueError) as error:
        raise ProtocolError("a frame cannot be parsed") from error
    if len(pb.messages) + len(pb.acks) > MOST_PARTS:
        raise ProtocolError(f"a frame has more than {MOST_PARTS} parts")
    return frame_from_pb(pb)


def _has_more_fields(raw: bytes, most: int) -> bool:
    """Counts the fields of a message on the wire, without what is inside of them."""
    at, end = 0, len(raw)
    for _ in range(most):
        if at >= end:
            return False
        tag, at = read_varint(raw, at)
        match tag & 7:
            case 0:
                _, at = read_varint(raw, at)
            case 1:
                at += 8
            case 2:
                length, at = read_varint(raw, at)
                at += length
            case 5:
                at += 4
            case _:
                return False  # a group, or no message at all: the parser refuses it
    return at < end


def frame_from_pb(pb: link_pb2.Frame) -> Frame:
    """Raises `ProtocolError`: our own processes never send incomplete messages."""
    hello = Hello(pb.hello.incarnation, pb.hello.peer_incarnation) if pb.HasField("hello") else None
    parcels = _parcels(pb.messages, pb.patience_ms) if pb.messages else []
    return Frame(pb.first, parcels, [receipt_from_pb(ack) for ack in pb.acks], pb.received, hello)


def _parcels(
    messages: Sequence[tasknet_pb2.Message], patience_ms: Sequence[int]
) -> Sequence[Parcel]:
    if len(patience_ms) != len(messages):
        raise ProtocolError(
            f"{len(messages)} messages but {len(patience_ms)} values of patience_ms"
        )
    parcels = []
    for pb, wait_ms in zip(messages, patience_ms, strict=True):
        parcel = message_from_pb(pb, wait_ms / 1000)
        if isinstance(parcel, NetCode):
            raise ProtocolError(f"invalid message in a frame: {parcel.sentence}")
        parcels.append(parcel)
    return parcels
