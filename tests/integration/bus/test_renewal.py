"""Certificates and tokens that are renewed while servers run: no restart, no lost message."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from taskd.bus.security import Tls
from taskd.clusterd.auth import TokenFile
from taskd.errors import SettingsError
from taskd.model.codes import NetCode
from taskd.model.ids import agent, manager
from taskd.model.messages import RestartsLeft
from tests.integration.bus.bus_nodes import next_of, running_bus
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
