"""The client against a real etcd."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from taskd.clusterd.etcd.etcd_client import (
    EtcdClient,
    delete,
    get,
    has_value,
    is_at,
    is_missing,
    put,
)
from taskd.clusterd.etcd.etcd_errors import EtcdRefused, EtcdUnanswered, LeaseNotFound
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.runtime.address import free_port
from taskd.runtime.retry import Tries, every
from tests.integration.certificates import Authority
from tests.integration.etcd.etcd_server import EtcdServer, running

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


async def ready(client: EtcdClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for _ in Tries(every(0.1)):
            try:
                await client.range("x")
            except EtcdUnanswered:
                continue
            return


def test_transactions_leases_and_watches(etcd: EtcdServer) -> None:
    async def scenario() -> None:
        client = EtcdClient([etcd.client], call_s=10.0)
        await ready(client)
        assert (await client.check_version()).startswith("3.")
        lease, ttl_s = await client.grant(30.0)
        assert ttl_s == 30.0
        first = await client.transact([is_missing("t/a")], [put("t/a", b"1", lease)])
        assert first.succeeded
        again = await client.transact([is_missing("t/a")], [put("t/a", b"2")], [get("t/a")])
        assert not again.succeeded
        ((found,),) = again.found
        assert (found.value, found.lease, found.mod_revision) == (b"1", lease, first.revision)
        both = [is_at("t/a", first.revision), has_value("t/a", b"1")]
        assert (await client.transact(both, [put("t/b", b"3"), delete("t/c")])).succeeded
        assert [one.key for one in await client.range("t/", prefix=True)] == ["t/a", "t/b"]
        assert await client.renew(lease) > 0
        async with aclosing(client.watch("t/a")) as changes:
            await anext(changes)
            await client.revoke(lease)
            async with asyncio.timeout(DEADLINE_S):
                await anext(changes)
        assert await client.range("t/a") == ()
        with pytest.raises(LeaseNotFound):
            await client.renew(lease)
        with pytest.raises(LeaseNotFound):
            await client.transact([], [put("t/d", b"", lease)])
        (member,) = await client.members()
        assert member.name == "a"
        await client.close()

    asyncio.run(scenario())


def test_stopped_etcd_is_left_for_the_next_address(etcd: EtcdServer) -> None:
    async def scenario() -> None:
        client = EtcdClient([etcd.client, "127.0.0.1:1"], call_s=10.0)
        await ready(client)
        await client.close()
        client = EtcdClient([etcd.client, "127.0.0.1:1"], call_s=0.3)
        etcd.pause()
        try:
            with pytest.raises(EtcdUnanswered, match="did not answer"):
                await client.range("x")
            assert client.address == "127.0.0.1:1"
        finally:
            etcd.resume()
        await ready(client)
        assert client.address == etcd.client
        await client.close()

    asyncio.run(scenario())


async def fill(client: EtcdClient) -> None:
    for number in range(100):
        await client.transact([], [put(f"k{number}", b"x" * 1_000_000)])


def test_full_etcd_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        client = EtcdClient([address], call_s=10.0)
        await ready(client)
        with pytest.raises(EtcdRefused, match="alarm disarm"):
            await fill(client)
        await client.close()

    with running(tmp_path / "data", "--quota-backend-bytes=2000000") as server:
        asyncio.run(scenario(server.client))


def test_users_and_passwords(tmp_path: Path) -> None:
    def post(address: str, path: str, **body: str) -> None:
        request = Request(f"http://{address}/v3/auth/{path}", json.dumps(body).encode())
        with urlopen(request, timeout=DEADLINE_S):
            pass

    async def scenario(address: str) -> None:
        client = EtcdClient([address], call_s=10.0)
        await ready(client)
        post(address, "user/add", name="root", password="p")
        post(address, "user/grant", user="root", role="root")
        post(address, "enable")
        with pytest.raises(EtcdRefused, match="TASKD_ETCD_USER"):
            await client.range("x")
        await client.close()
        client = EtcdClient([address], EtcdSettings(user="root", password="q"), call_s=10.0)
        with pytest.raises(EtcdRefused, match="password"):
            await client.range("x")
        await client.close()
        client = EtcdClient([address], EtcdSettings(user="root", password="p"), call_s=10.0)
        assert (await client.transact([], [put("x", b"")])).succeeded
        client._token = "expired"
        assert len(await client.range("x")) == 1, "it signs in again"
        await client.close()

    with running(tmp_path / "data", "--bcrypt-cost=4") as server:
        asyncio.run(scenario(server.client))


def test_client_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "etcd")
    key, crt = authority.issue("server")
    own_key, own_crt = authority.issue("client")
    options = (
        *(f"--cert-file={crt}", f"--key-file={key}", "--client-cert-auth"),
        f"--trusted-ca-file={authority.ca}",
    )

    async def scenario(address: str) -> None:
        tls: dict[str, Any] = {"ca": str(authority.ca), "crt": own_crt, "key": own_key}
        client = EtcdClient([address], EtcdSettings(**tls), call_s=10.0)
        await ready(client)
        await client.close()
        signed_in = EtcdSettings(**tls, user="taskd", password="wrong")
        client = EtcdClient([address], signed_in, call_s=10.0)
        with pytest.raises(EtcdRefused, match="unset TASKD_ETCD_USER"):
            await client.range("x")
        await client.close()
        client = EtcdClient([address], EtcdSettings(ca=str(authority.ca)), call_s=2.0)
        with pytest.raises(EtcdUnanswered):
            await client.range("x")
        await client.close()

    with running(tmp_path / "data", *options, scheme="https") as server:
        asyncio.run(scenario(server.client))


def test_renewed_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    key, crt = new.issue("server")
    options = (
        *(f"--cert-file={crt}", f"--key-file={key}", "--client-cert-auth"),
        f"--trusted-ca-file={new.ca}",
    )
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "key", "crt")}

    def install(authority: Authority) -> None:
        sources = (str(authority.ca), *authority.issue("client"))
        for path, source in zip(files.values(), sources, strict=True):
            shutil.copy(source, path)

    async def scenario(address: str) -> None:
        install(new)
        first = EtcdClient([address], EtcdSettings(**_names(files)), call_s=10.0)
        await ready(first)
        await first.close()
        install(old)
        client = EtcdClient([address], EtcdSettings(**_names(files)), call_s=2.0)
        with pytest.raises(EtcdUnanswered):
            await client.range("x")
        install(new)
        with pytest.raises(EtcdUnanswered):
            await client.range("x")  # notices that the files have changed
        await ready(client)
        await client.close()

    with running(tmp_path / "data", *options, scheme="https") as server:
        asyncio.run(scenario(server.client))


def _names(files: dict[str, Path]) -> dict[str, Any]:
    return {name: str(path) for name, path in files.items()}


def test_cancelled_call_ends_although_its_answer_has_just_come() -> None:
    """Otherwise a clusterd that waits for etcd ignores SIGTERM."""

    async def scenario() -> None:
        client = EtcdClient([f"127.0.0.1:{free_port()}"], call_s=5.0)
        before = asyncio.all_tasks()
        for _ in range(50):
            call = asyncio.create_task(client.status())
            parts: set[asyncio.Task[Any]] = set()
            while not call.done() and not any(part.done() for part in parts):
                parts |= asyncio.all_tasks() - before - {call}
                await asyncio.sleep(0)
            if call.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                assert isinstance(call.exception(), EtcdUnanswered)
        await client.close()

    asyncio.run(scenario())
