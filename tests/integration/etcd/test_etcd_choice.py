"""How node 0 hears what the other nodes have, and how they hear what it has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from taskd.agent.etcd_member import choice_client
from taskd.agent.etcd_member.choice_client import say, tell
from taskd.agent.etcd_member.choice_messages import Answer, choice_key
from taskd.agent.etcd_member.choice_server import ChoiceServer
from taskd.agent.etcd_member.home_address import forwarder
from taskd.agent.run.plan import listen
from taskd.core.etcd_choice import (
    DoWithout,
    Heard,
    JoinRunning,
    Offer,
    Runs,
    Stopped,
    UseEtcd,
    Wait,
    choose,
)
from taskd.errors import SettingsError
from taskd.runtime.address import Address, free_port
from taskd.runtime.retry import Tries, every

KEY = choice_key("job", "the job's secret")
NODES, DEADLINE_S = 3, 30.0
LOOPBACK = "127.0.0.1"


@dataclass
class NodeZero:
    server: ChoiceServer
    home: Address

    def node(self, number: int, cannot_use: str = "") -> asyncio.Task[Answer]:
        return self.says(f"node {number}", Offer(f"node {number}", cannot_use=cannot_use))

    def says(self, name: str, heard: Heard, key: str = KEY) -> asyncio.Task[Answer]:
        return asyncio.create_task(say(self.home, key, name, heard))

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            async for _ in Tries(every(0.01)):
                if self.server.names == list(names):
                    break


@asynccontextmanager
async def node_zero(reached_at: str = LOOPBACK) -> AsyncIterator[NodeZero]:
    with listen("0.0.0.0", None) as listener:
        home = Address(LOOPBACK, listener.getsockname()[1])
        of = partial(choose, NODES, Offer("node 0"))
        server = ChoiceServer(home, KEY, of, of(()))
        async with server.serve(listener):
            yield NodeZero(server, Address(reached_at, home.port))


@asynccontextmanager
async def other_program() -> AsyncIterator[Address]:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hangs_up, LOOPBACK, 0)
    async with server:
        yield Address(*server.sockets[0].getsockname())


def test_nodes_hear_the_choice_when_the_last_one_has_come() -> None:
    async def scenario() -> list[Answer]:
        async with node_zero() as zero:
            first = zero.node(1)
            await zero.wait_for("node 1")
            assert zero.server.choice == Wait(1)
            return list(await asyncio.gather(first, zero.node(2)))

    assert asyncio.run(scenario()) == [Answer(uses=True)] * 2


def test_node_that_ends_while_it_waits_is_waited_for_again() -> None:
    async def scenario() -> None:
        async with node_zero() as zero:
            first = zero.node(1)
            await zero.wait_for("node 1")
            first.cancel()
            await zero.wait_for()
            second = zero.node(2)
            await zero.wait_for("node 2")
            assert not zero.server.chosen.is_set()
            await asyncio.gather(zero.node(1), second)
            assert isinstance(zero.server.choice, UseEtcd)

    asyncio.run(scenario())


def test_launcher_that_is_started_again_does_not_count_twice() -> None:
    async def scenario() -> None:
        async with node_zero() as zero:
            old = zero.node(1)
            await zero.wait_for("node 1")
            again = zero.says("node 1", Offer("node 1 again"))
            await zero.wait_for("node 1 again")
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            assert await zero.node(2) == await again == Answer(uses=True)
            assert isinstance(zero.server.choice, UseEtcd)

    asyncio.run(scenario())


def test_one_node_that_cannot_use_etcd_frees_those_that_wait() -> None:
    async def scenario() -> list[Answer]:
        async with node_zero() as zero:
            first = zero.node(1)
            await zero.wait_for("node 1")
            answers = await asyncio.gather(first, zero.node(2, cannot_use="no certificates"))
            late = await zero.node(3)
            return [*answers, late]

    assert asyncio.run(scenario()) == [Answer(uses=False)] * 3


@pytest.mark.parametrize(
    ("heard", "expected", "answer"),
    [
        (Runs(), DoWithout, Answer(uses=False)),
        (Runs(("b:1",)), JoinRunning, Answer(uses=True)),
        (Stopped("a signal"), object, Answer(uses=False, ended="a signal")),
    ],
)
def test_running_or_stopped_job_is_not_waited_for(
    heard: Heard, expected: type, answer: Answer
) -> None:
    async def scenario() -> None:
        async with node_zero() as zero:
            first = zero.node(1)
            await zero.wait_for("node 1")
            await tell(zero.home, KEY, "a node", heard)
            assert await first == answer
            assert isinstance(zero.server.choice, expected)

    asyncio.run(scenario())


@pytest.mark.parametrize("key", [choice_key("job", "guessed"), choice_key("another job", "secret")])
def test_stranger_is_not_heard(key: str) -> None:
    async def scenario() -> None:
        async with node_zero() as zero:
            with pytest.raises(EOFError):
                await zero.says("node 1", Offer("node 1", cannot_use="x"), key)
            assert zero.server.choice == Wait(2)
            _, writer = await asyncio.open_connection(LOOPBACK, zero.home.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            answers = list(await asyncio.gather(zero.node(1), zero.node(2)))
            writer.close()
            assert answers == [Answer(uses=True)] * 2

    asyncio.run(scenario())


def test_node_zero_that_is_reached_at_another_address_than_its_own_does_without() -> None:
    """Its name means 127.0.0.1 to itself, and 127.0.0.2 to the others."""

    async def scenario() -> None:
        async with node_zero("127.0.0.2") as zero:
            assert await zero.node(1) == Answer(uses=False)
            assert isinstance(zero.server.choice, DoWithout), zero.server.choice
            assert "--master-addr" in zero.server.choice.because

    asyncio.run(scenario())


def test_etcd_that_runs_already_is_served_and_announced_at_one_address() -> None:
    async def scenario() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(100))
            writer.close()

        server = await asyncio.start_server(echo, LOOPBACK, 0)
        member = f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        home = Address(LOOPBACK, free_port())
        answered = asyncio.Event()
        async with server, forwarder(home, lambda: (member,), KEY, answered.is_set):
            assert await say(home, KEY, "node 1", Offer("node 1")) == Answer(True, serves=False)
            answered.set()
            assert await say(home, KEY, "node 1", Offer("node 1")) == Answer(True, serves=True)
            reader, writer = await asyncio.open_connection(home.host, home.port)
            writer.write(b"a client of etcd")
            assert await reader.read() == b"a client of etcd"
            writer.close()

    asyncio.run(scenario())


def test_manager_that_runs_where_no_choice_is_offered_has_no_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice_client, "UNSERVED_S", 0.5)

    async def scenario() -> Answer:
        async with other_program() as manager:
            home = Address(LOOPBACK, free_port())
            return await choice_client.ask(
                home, manager, KEY, "node 1", Offer("node 1"), DEADLINE_S
            )

    assert asyncio.run(scenario()) == Answer(uses=False)


def test_node_goes_on_asking_while_nothing_proves_that_node_zero_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node 0 is very slow: its kernel accepts connections, and no process answers."""
    for limit in ("FOREIGN_S", "UNSERVED_S", "NONCE_S"):
        monkeypatch.setattr(choice_client, limit, 0.1)

    async def scenario() -> None:
        with listen(LOOPBACK, None) as manager, listen(LOOPBACK, None) as listener:
            home, at = (Address(*one.getsockname()) for one in (listener, manager))
            with pytest.raises(SettingsError):
                await choice_client.ask(home, at, KEY, "node 1", Offer("node 1"), 2.0)

    asyncio.run(scenario())


def test_node_that_reaches_only_the_manager_says_so_there() -> None:
    """A firewall on node 0, or a service with a list of ports."""

    async def scenario() -> tuple[list[Answer], object]:
        with listen(LOOPBACK, None) as listener, listen(LOOPBACK, None) as manager:
            home, at = (Address(*one.getsockname()) for one in (listener, manager))
            of = partial(choose, NODES, Offer("node 0"))
            server = ChoiceServer(home, KEY, of, of(()))
            async with server.serve(listener, manager):
                near = asyncio.create_task(say(home, KEY, "node 1", Offer("node 1")))
                blocked = Address(LOOPBACK, free_port())
                offer = Offer("node 2")
                far = await choice_client.ask(blocked, at, KEY, "node 2", offer, DEADLINE_S)
                return [far, await near], server.choice

    answers, choice = asyncio.run(scenario())
    assert answers == [Answer(uses=False)] * 2
    assert isinstance(choice, DoWithout)
    assert "node 2 cannot use it: it reaches 127.0.0.1:" in choice.because


def test_other_program_at_the_address_of_etcd_is_soon_recognized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice_client, "FOREIGN_S", 0.5)

    async def scenario() -> Answer:
        async with other_program() as home, other_program() as at:
            return await choice_client.ask(home, at, KEY, "node 1", Offer("node 1"), DEADLINE_S)

    assert asyncio.run(scenario()) == Answer(uses=False)


def test_missing_node_zero_is_named() -> None:
    async def scenario() -> None:
        home, manager = Address(LOOPBACK, free_port()), Address(LOOPBACK, free_port())
        with pytest.raises(SettingsError, match=f"{home} .* {manager}"):
            await choice_client.ask(home, manager, KEY, "node 1", Offer("node 1"), 1.0)

    asyncio.run(scenario())
