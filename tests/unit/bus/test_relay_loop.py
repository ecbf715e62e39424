"""The relay in its loop: every use of it hands out its results."""

from __future__ import annotations

import asyncio

import pytest

from taskd.bus.relay_loop import RelayLoop
from taskd.core.bus.relay import Relay
from taskd.model.bus import Parcel, Received
from taskd.model.codes import NetCode
from taskd.model.ids import Position, agent, manager
from taskd.model.messages import RequestHello


def relay_loop() -> RelayLoop:
    def read(parcel: Parcel) -> Received:
        return Received(parcel.src, parcel.dst, parcel.uuid, parcel.mtype, RequestHello())

    return RelayLoop(Relay(manager(), True, read, new_incarnation=lambda: "x"), "me")


def parcel(dst: Position) -> Parcel:
    return Parcel("uuid", "default", True, manager(), dst, "{}", 3.0)


def test_answers_are_handed_out_at_the_end_of_each_use() -> None:
    async def main() -> None:
        loop = relay_loop()
        ticket, answer = loop.ticket()
        with loop.relay() as relay:
            relay.send(parcel(agent(7)), ticket, 0.0)
            assert not answer.done()
        assert answer.done()
        assert answer.result().code == NetCode.NoRoute

    asyncio.run(main())


def test_answers_are_handed_out_after_an_exception() -> None:
    async def main() -> None:
        loop = relay_loop()
        ticket, answer = loop.ticket()

        def fail() -> None:
            with loop.relay() as relay:
                relay.send(parcel(agent(7)), ticket, 0.0)
                raise LookupError

        with pytest.raises(LookupError):
            fail()
        assert answer.done()

    asyncio.run(main())


def test_second_use_inside_the_first_is_an_error() -> None:
    """What an await inside of `with` would lead to."""

    async def main() -> None:
        loop = relay_loop()
        with loop.relay(), pytest.raises(AssertionError, match="in use"), loop.relay():
            pass
        with loop.relay():
            pass

    asyncio.run(main())


def test_message_for_this_node_wakes_the_receiver() -> None:
    async def main() -> None:
        loop = relay_loop()
        receiving = asyncio.create_task(loop.receive())
        await asyncio.sleep(0)
        ticket, _ = loop.ticket()
        with loop.relay() as relay:
            relay.send(parcel(manager()), ticket, 0.0)
        assert (await receiving).uuid == "uuid"

    asyncio.run(main())
