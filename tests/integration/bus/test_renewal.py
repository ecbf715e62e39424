"""Certificates and tokens that are renewed while servers run: no restart, no lost message."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from taskd.bus.endpoint import Bus
from taskd.bus.job_secrets import JobSecrets
from taskd.bus.security import Tls
from taskd.clusterd.auth import TokenFile
from taskd.errors import SettingsError
from taskd.model.bus import Left
from taskd.model.codes import NetCode
from taskd.model.ids import agent, manager
from taskd.model.messages import RestartsLeft
from tests.integration.bus.bus_nodes import PATIENCE_S, next_of, proxy, running_bus
from tests.integration.certificates import Authority

NAMES = ("ca", "server_key", "server_crt", "client_key", "client_crt")


def install(folder: Path, source: Tls) -> Tls:
    """Copy the files over those that a server uses."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        shutil.copy(getattr(source, name), folder / name)
    return Tls(**{name: str(folder / name) for name in NAMES})


def test_new_certificates_are_used_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Authority(tmp_path, "old").tls("everyone")
    new = Authority(tmp_path, "new").tls("everyone")

    async def scenario() -> None:
        used = install(tmp_path / "used", old)
        secret: Any = {"job": "job-1", "token": "s3cret"}
        async with running_bus(manager(), None, serves=True, tls=used, **secret) as top:
            async with running_bus(agent(1), top, tls=old, **secret) as first:
                assert (await first.send(manager(), RestartsLeft(1))).code == NetCode.OK
                (tmp_path / "used" / "server_key").write_text("half written")
                install(tmp_path / "used", new)
                async with running_bus(agent(2), top, tls=new, **secret) as second:
                    assert (await second.send(manager(), RestartsLeft(2))).code == NetCode.OK
                    assert (await first.send(manager(), RestartsLeft(3))).code == NetCode.OK
            got = [(await next_of(top)).body for _ in range(3)]
            assert got == [RestartsLeft(1), RestartsLeft(2), RestartsLeft(3)]

    asyncio.run(scenario())


def test_secrets_of_the_bus_are_renewed_without_a_lost_message(tmp_path: Path) -> None:
    """Add the new one, present it, remove the old one; a thief of the old one is thrown out."""
    file = tmp_path / "secrets"
    file.touch(mode=0o600)
    file.write_text("old\n")
    known: Any = {"job": "job-1", "token": "s3cret", "token_file": str(file)}

    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True, **known) as top,
            running_bus(proxy(1), top, serves=True, **known) as between,
            running_bus(agent(1), between, job="job-1", token="s3cret") as below,
        ):
            file.write_text("new#1 #2\nold\n")
            async with running_bus(proxy(2), top, job="job-1", token="old") as thief:
                ended = [asyncio.create_task(_left(one)) for one in (thief, between)]
                file.write_text("new\n")
                sent = 0
                async with asyncio.timeout(PATIENCE_S):
                    while not all(one.done() for one in ended):
                        assert (await below.send(manager(), RestartsLeft(sent))).code == NetCode.OK
                        sent += 1
                    assert await between.join()
                    while "the token is not for" not in thief.disconnect_reason:
                        assert not await thief.join(0.05), "it was let in"
            assert (await below.send(manager(), RestartsLeft(sent))).code == NetCode.OK
            got = [(await next_of(top)).body for _ in range(sent + 1)]
            assert got == [RestartsLeft(number) for number in range(sent + 1)]

    asyncio.run(scenario())


async def _left(bus: Bus) -> None:
    """Wait until it loses its upstream connection."""
    watcher = bus.changes()
    async for change in watcher:
        if isinstance(change, Left):
            watcher.end()
            return


def test_secrets_that_cannot_be_read_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secrets"
    with pytest.raises(SettingsError, match="cannot read"):
        JobSecrets("", str(file))
    file.write_text("# none yet\n")
    with pytest.raises(SettingsError, match="contains no secret"):
        JobSecrets("", str(file))
    file.write_text("old # until Monday\n")
    secrets = JobSecrets("", str(file))
    assert "can be read or written by others" in caplog.text
    for damage in (b"", b"\xff\xfe", b"\n\n", b"#x"):
        file.write_bytes(damage)
        assert (secrets.presented, secrets.accepted) == ("old", ("old",))
    file.unlink()
    assert secrets.presented == "old"
    assert "the changed secrets are not used" in caplog.text
    file.write_text("new#1 #2\nold\n")
    assert (secrets.presented, secrets.accepted) == ("new#1", ("new#1", "old"))


def test_token_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text("job:a old\n")
    tokens = TokenFile(path)
    assert tokens.scope_of("old") == "job:a"
    path.write_text("job:a old\njob:a new\n")
    assert tokens.scope_of("new") == tokens.scope_of("old") == "job:a"
    path.write_text("nonsense\n")
    assert tokens.scope_of("new") == "job:a"
    assert "the changed token file is not used" in caplog.text
    path.unlink()
    assert tokens.scope_of("new") == "job:a"
    path.write_text("job:a new and more\njob:b x\n".replace(" and more", ""))
    assert tokens.scope_of("old") is None
    with pytest.raises(SettingsError):
        TokenFile(tmp_path / "missing")
