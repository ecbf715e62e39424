"""Invalid input, by mistake or malice: each gets a code or a status, and the bus keeps working."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from taskd.bus.endpoint import Bus, PeerJoined
from taskd.bus.stream import EOF
from taskd.core.bus.relay import RelayConfig
from taskd.model.codes import NetCode
from taskd.model.ids import Position, agent, manager, worker
from taskd.model.messages import RestartsLeft, StartWorkers, Unknown
from taskd.wire._pb import link_pb2
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire._pb.link_pb2_grpc import LinkStub
from taskd.wire.bus_frames import position_to_pb
from tests.attack.attacks import EMPTY_HEADER, PREFACE, frame, headers
from tests.integration.bus.ascend_peers import AscendClient, ascend_client, envelope, message
from tests.integration.bus.bus_nodes import PATIENCE_S, next_of, running_bus, until_change

GOOD = envelope("REGISTER", 0)
AGENT_1 = (("role", "Agent"), ("serverrank", "1"), ("processrank", "-1"))


@asynccontextmanager
async def under_attack(**settings: Any) -> AsyncIterator[tuple[Bus, AscendClient]]:
    """A manager, a good child and a stranger. Afterwards the good child is served as before."""
    async with (
        running_bus(manager(), None, serves=True, **settings) as mgr,
        running_bus(agent(0), mgr) as good,
        ascend_client(agent(1), mgr.port) as stranger,
    ):
        yield mgr, stranger
        while mgr._relay_loop._relay.inbox:
            await mgr.receive()
        assert (await good.send(manager(), RestartsLeft(1))).code == NetCode.OK
        assert (await mgr.send(agent(0), StartWorkers(1))).code == NetCode.OK
        assert (await next_of(good)).body == StartWorkers(1)


def bare_channel(port: int) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


def with_positions(src: Position | None, dst: Position | None) -> pb.Message:
    header = pb.MessageHeader(uuid="u", sync=True)
    if src is not None:
        header.src.CopyFrom(position_to_pb(src))
    if dst is not None:
        header.dst.CopyFrom(position_to_pb(dst))
    return pb.Message(header=header, body=GOOD)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(pb.Message(), NetCode.NilMessage, id="an empty frame"),
        pytest.param(pb.Message(body="x"), NetCode.NilHeader, id="no header"),
        pytest.param(with_positions(None, manager()), NetCode.NilPosition, id="no source"),
        pytest.param(with_positions(agent(1), None), NetCode.NilPosition, id="no destination"),
        pytest.param(
            with_positions(agent(1), Position("Boss", "0")), NetCode.DstRoleIllegal, id="role"
        ),
        pytest.param(
            with_positions(agent(1), Position("Mgr", "one")), NetCode.DstSrvRankIllegal, id="rank"
        ),
        pytest.param(
            with_positions(agent(1), Position("Worker", "1", "1,,2")),
            NetCode.DstProcessRankIllegal,
            id="list",
        ),
        pytest.param(message(agent(1), manager(), "no JSON"), NetCode.ClientErr, id="no JSON"),
        pytest.param(message(agent(1), manager(), "[1]"), NetCode.ClientErr, id="no object"),
        pytest.param(message(agent(1), manager(), "[" * 100_000), NetCode.ClientErr, id="deep"),
    ],
)
def test_invalid_message_gets_its_code(sent: pb.Message, code: NetCode) -> None:
    async def scenario() -> None:
        async with under_attack() as (_, stranger):
            await stranger.join()
            ack = await stranger.send(sent)
            assert (ack.code, ack.uuid) == (code, sent.header.uuid)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("pos", "code"),
    [
        (None, NetCode.NilPosition),
        (Position("", "0"), NetCode.DstRoleIllegal),
        (Position("Agent", "-1"), NetCode.DstSrvRankIllegal),
        (Position("Agent", "All"), NetCode.DstSrvRankIllegal),
        (Position("Worker", "0", "x"), NetCode.DstProcessRankIllegal),
        (Position("Proxy", "0", "t" * 1000), NetCode.DstProcessRankIllegal),
        (Position("Mgr", "0"), NetCode.DstTypeIllegal),
    ],
)
def test_invalid_registration_gets_its_code(pos: Position | None, code: NetCode) -> None:
    async def scenario() -> None:
        async with under_attack() as (_, stranger):
            sent = None if pos is None else position_to_pb(pos)
            ack = await stranger.stub.Register(pb.RegisterReq(uuid="r", pos=sent))
            assert ack.code == code
            path = [] if sent is None else [sent]
            request = pb.PathDiscoveryReq(uuid="p", proxyPos=sent, path=path)
            assert (await stranger.stub.PathDiscovery(request)).code != NetCode.OK

    asyncio.run(scenario())


def test_leaf_cannot_announce_others_and_unregistered_peer_cannot_announce() -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, stranger):
            me, other = position_to_pb(agent(1)), position_to_pb(worker(0, 0))
            early = pb.PathDiscoveryReq(uuid="p", proxyPos=me, path=[me])
            assert (await stranger.stub.PathDiscovery(early)).code == NetCode.ClientErr
            await stranger.join()
            stolen = pb.PathDiscoveryReq(uuid="p", proxyPos=me, path=[me, other])
            assert (await stranger.stub.PathDiscovery(stolen)).code == NetCode.ClientErr
            assert worker(0, 0) not in mgr.below()

    asyncio.run(scenario())


def test_message_of_9_mib_is_refused_by_call_and_by_stream() -> None:
    async def scenario() -> None:
        async with under_attack() as (_, stranger):
            await stranger.join()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stranger.send(message(agent(1), manager(), "x" * (9 << 20)))
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            # What gRPC just lets through still has to fit into a frame to the next hop.
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stranger.send(message(agent(1), agent(0), "x" * ((8 << 20) + 1)))
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            ack = await stranger.send(message(agent(1), agent(0), "x" * ((8 << 20) - 200)))
            assert ack.code == NetCode.ClientErr

    asyncio.run(scenario())


def test_more_registrations_than_the_table_holds() -> None:
    """Over the wire, with a small table; tests/unit/core/bus/test_relay.py has 100,000 and the
    real one.
    """

    async def scenario() -> None:
        limits = RelayConfig(max_children=50, child_grace_s=600)  # none is withdrawn meanwhile
        async with under_attack(relay=limits) as (mgr, stranger):
            asked = [pb.RegisterReq(pos=position_to_pb(worker(1, rank))) for rank in range(500)]
            acks = []
            for at in range(0, 500, 100):
                acks += await asyncio.gather(*map(stranger.stub.Register, asked[at : at + 100]))
            full = [ack.code for ack in acks].count(NetCode.ExceedMaxRegistryNum)
            assert full == 500 - 49
            assert len(mgr._relay_loop.routes.children) == 50

    asyncio.run(scenario())


def test_too_many_calls_per_second_are_refused() -> None:
    async def scenario() -> None:
        async with under_attack(max_calls_per_s=50) as (_, stranger):
            calls = [stranger.stub.Register(pb.RegisterReq()) for _ in range(100)]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.gather(*calls)
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(scenario())


def test_stream_without_registration_is_refused() -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, stranger):
            stranger.open()
            with pytest.raises(grpc.aio.AioRpcError, match="has not registered") as raised:
                await stranger.stream.read()
            assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            async with bare_channel(mgr.port) as channel:
                call = LinkStub(channel).Open()  # type: ignore[no-untyped-call]
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
                assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_unexpected_ack_changes_nothing() -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, stranger):
            await stranger.join()
            for number in range(1000):
                await stranger.stream.write(pb.Ack(uuid=f"n{number}", code=number))
            await stranger.stream.write(pb.Ack())
            sending = asyncio.create_task(mgr.send(agent(1), StartWorkers(1)))
            await stranger.acknowledge(await stranger.receive())
            assert (await sending).code == NetCode.OK

    asyncio.run(scenario())


@pytest.mark.parametrize("speaks_link", [False, True])
def test_client_that_stops_reading_loses_only_its_own_messages(
    speaks_link: bool,
) -> None:
    async def scenario() -> None:
        limits = RelayConfig(max_window=200, max_window_bytes=4 << 20)
        async with under_attack(relay=limits) as (mgr, stranger), bare_channel(mgr.port) as channel:
            await stranger.join(stream=not speaks_link)
            if speaks_link:
                call = LinkStub(channel).Open(metadata=AGENT_1)  # type: ignore[no-untyped-call]
                await call.write(link_pb2.Frame(hello=link_pb2.Hello(incarnation="a")))
            await until_change(mgr, PeerJoined(agent(1)))
            codes: set[NetCode] = set()
            body = Unknown("ACTION", 9, "x" * 100_000)
            while len(codes) < 2:
                sent = await mgr.send(agent(1), body, sync=False, timeout_s=0.01)
                codes.add(sent.code)
            assert codes == {NetCode.OK, NetCode.NetworkSendLost}

    asyncio.run(scenario())


def test_full_inbox_answers_busy() -> None:
    async def scenario() -> None:
        async with under_attack(relay=RelayConfig(max_inbox=3)) as (_, stranger):
            await stranger.join()
            for number in range(3):
                await stranger.send(message(agent(1), manager(), GOOD, uuid=f"u{number}"))
            with pytest.raises(grpc.aio.AioRpcError, match="5001"):
                await stranger.send(message(agent(1), manager(), GOOD, uuid="u3"))

    asyncio.run(scenario())


def confused_frames() -> list[link_pb2.Frame]:
    half = pb.Message(header=pb.MessageHeader(uuid="x"))
    whole = message(agent(1), manager(), GOOD)
    hello = link_pb2.Hello(incarnation="a")
    return [
        link_pb2.Frame(),
        link_pb2.Frame(hello=link_pb2.Hello()),
        link_pb2.Frame(hello=hello, received=7, first=7, messages=[whole]),
        link_pb2.Frame(hello=link_pb2.Hello(incarnation="a", peer_incarnation="b"), received=99),
        link_pb2.Frame(first=5, messages=[whole], patience_ms=[1]),
        link_pb2.Frame(first=1, messages=[whole]),
        link_pb2.Frame(first=1, messages=[half], patience_ms=[1]),
        link_pb2.Frame(received=1 << 60),
    ]


@pytest.mark.parametrize("greets", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_peer_that_breaks_the_link_protocol_is_disconnected(number: int, greets: bool) -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, stranger):
            await stranger.stub.Register(pb.RegisterReq(pos=position_to_pb(agent(1))))
            async with bare_channel(mgr.port) as channel:
                call = LinkStub(channel).Open(metadata=AGENT_1)  # type: ignore[no-untyped-call]
                if greets:
                    await call.write(link_pb2.Frame(hello=link_pb2.Hello(incarnation="a")))
                await call.write(confused_frames()[number])
                await call.done_writing()
                with suppress(grpc.aio.AioRpcError):
                    await to_the_end(call)
                assert await call.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.OK,  # The stream ended before it became interesting.
                )

    asyncio.run(scenario())


@pytest.mark.parametrize("part", [b"\x12\x00", b"\x1a\x00", b"\x1a\x02\x1a\x00"])
def test_frame_of_countless_empty_parts_is_not_parsed(part: bytes) -> None:
    """Sent by a member: two bytes each on the wire, and hundreds once they are parsed."""

    async def scenario() -> None:
        async with under_attack() as (mgr, stranger):
            await stranger.stub.Register(pb.RegisterReq(pos=position_to_pb(agent(1))))
            async with bare_channel(mgr.port) as channel:
                call = channel.stream_stream("/taskd.v1.Link/Open", None, None)(metadata=AGENT_1)
                hello = link_pb2.Frame(hello=link_pb2.Hello(incarnation="a"))
                await call.write(hello.SerializeToString())
                await call.write(part * (1_000_000 // len(part)))
                with suppress(grpc.aio.AioRpcError):
                    await to_the_end(call)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "parts" in await call.details()

    asyncio.run(scenario())


def noise(seed: int) -> bytes:
    dice = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    start: Callable[[], bytes] = dice.choice(
        [lambda: b"", lambda: preface, lambda: b"GET / HTTP/1.1\r\n\r\n", lambda: preface[:7]]
    )
    return start() + dice.randbytes(dice.randrange(1, 4000))


def test_raw_bytes_on_the_socket_do_not_disturb_the_server() -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, _):
            for seed in range(40):
                reader, writer = await asyncio.open_connection("127.0.0.1", mgr.port)
                writer.write(noise(seed))
                if seed % 2:
                    writer.transport.abort()
                else:
                    writer.write_eof()
                    async with asyncio.timeout(PATIENCE_S):
                        with suppress(ConnectionError):
                            await reader.read()
                    writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["/TaskNet/Register", "/No/Such"])
def test_call_with_a_thousand_headers_costs_the_connection(method: str) -> None:
    """gRPC enforces no limit before the peer has confirmed it, and this one never does."""

    async def check() -> None:
        async with under_attack() as (mgr, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", mgr.port)
            call = headers(method, "here") + 1000 * EMPTY_HEADER
            writer.write(PREFACE + frame(1, 5, 1, call))
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
            writer.close()

    asyncio.run(check())


def test_bytes_that_are_not_the_expected_message_are_refused() -> None:
    async def scenario() -> None:
        async with under_attack() as (mgr, stranger), bare_channel(mgr.port) as channel:
            await stranger.stub.Register(pb.RegisterReq(pos=position_to_pb(agent(1))))
            for method in ("Register", "PathDiscovery", "TransferMessage", "Nothing"):
                call = channel.unary_unary(f"/TaskNet/{method}")
                dice = random.Random(method)
                for _ in range(20):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call(b"\xff" + dice.randbytes(30))
                    assert raised.value.code() in (
                        grpc.StatusCode.INVALID_ARGUMENT,
                        grpc.StatusCode.UNIMPLEMENTED,
                        grpc.StatusCode.UNKNOWN,
                    )
            for method in ("/TaskNet/InitServerDownStream", "/taskd.v1.Link/Open"):
                stream = channel.stream_stream(method)(metadata=AGENT_1)
                await stream.write(b"\xff\xff\xff")
                with pytest.raises(grpc.aio.AioRpcError):
                    await to_the_end(stream)

    asyncio.run(scenario())


async def to_the_end(stream: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await stream.read() is not EOF:
            pass


def test_any_envelope_gets_an_answer() -> None:
    async def scenario() -> None:
        async with under_attack() as (_, stranger):
            await stranger.join()
            shapes: list[object] = [None, 1, "x", {}, {"code": "1"}, {"msg_type": 1, "code": 1}]
            shapes += [{"msg_type": "A", "code": 1, "message": "", "extension": [1]}]
            shapes += [{"msg_type": "STATUS", "code": 202, "message": "{", "extension": {}}]
            shapes += [{"msg_type": "ACTION", "code": 1001, "message": "{}", "extension": {}}]
            for number, shape in enumerate(shapes):
                body = json.dumps(shape)
                sent = message(agent(1), manager(), body, uuid=f"s{number}")
                assert (await stranger.send(sent)).code == NetCode.ClientErr, shape
            unknown = envelope("WHAT", 77, "is this")
            ack = await stranger.send(message(agent(1), manager(), unknown, uuid="ok"))
            assert ack.code == NetCode.OK

    asyncio.run(scenario())
