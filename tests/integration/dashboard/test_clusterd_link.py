"""The dashboard's channel while the certificates of clusterd are renewed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from taskd.bus.security import ClusterdTlsSettings, Tls
from taskd.clusterd.auth import Tokens
from taskd.clusterd.main import ServerConfig, serve
from taskd.dashboard.clusterd_link import ClusterdLink
from taskd.errors import PeerUnreachable
from tests.integration.certificates import Authority


def test_renewed_authority_is_used_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    key, crt = new.issue("clusterd")
    ca = tmp_path / "ca.pem"
    shutil.copy(old.ca, ca)

    async def scenario() -> None:
        tls = Tls(ca="", server_key=key, server_crt=crt)
        config = ServerConfig(tls=tls, tokens=Tokens({"boss": "operator"}))
        async with serve(config) as server:
            link = ClusterdLink(server.address, ClusterdTlsSettings(ca=str(ca)))
            with pytest.raises(PeerUnreachable):
                await link.jobs("boss")
            ca.write_text("half written")
            with pytest.raises(PeerUnreachable):
                await link.jobs("boss")
            shutil.copy(new.ca, ca)
            with pytest.raises(PeerUnreachable):
                await link.jobs("boss")  # notices that the file has changed
            assert (await link.jobs("boss")).scope == "operator"
            await link.close()

    asyncio.run(scenario())
