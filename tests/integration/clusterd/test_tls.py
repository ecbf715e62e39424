"""Every kind of client against a clusterd that requires client certificates."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.bus.security import (
    ClusterdTlsSettings,
    Tls,
    clusterd_credentials,
    clusterd_tls_from_environment,
)
from taskd.clusterd.main import ServerConfig, serve
from taskd.errors import SettingsError
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.settings import ManagerConfig
from taskd.python.toolkit.recover_module import DLRecoverManager
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.certificates import Authority
from tests.integration.clusterd.client import WAIT_S


def test_manager_command_and_recover_client_present_their_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "ours")
    key, crt = authority.issue("clusterd")
    own_key, own_crt = authority.issue("job:mine")
    config = ServerConfig(tls=Tls(ca=str(authority.ca), server_key=key, server_crt=crt))
    monkeypatch.setenv("TASKD_CLUSTERD_CA", str(authority.ca))
    monkeypatch.setenv("TASKD_CLUSTERD_CRT", own_crt)
    monkeypatch.setenv("TASKD_CLUSTERD_KEY", own_key)

    async def main() -> None:
        async with serve(config) as server, asyncio.timeout(4 * WAIT_S):
            manager = ClusterdClient(server.address, ManagerConfig(job_id="mine"))
            subscribed = asyncio.Event()
            listening = asyncio.create_task(manager.listen(lambda _: None, subscribed.set))
            await subscribed.wait()
            listening.cancel()
            await manager.close()
            info = pb.ClientInfo(jobId="mine", role="r")
            client = DLRecoverManager(info, server.address)
            assert (await asyncio.to_thread(client.register, info)).code == 0
            client.close()
            for given in ([], ["--ca", str(authority.ca), "--cert", own_crt, "--key", own_key]):
                command = [sys.executable, "-m", "taskd", "jobs", "--server", server.address]
                asked = await asyncio.to_thread(
                    subprocess.run,
                    [*command, *given],
                    capture_output=True,
                    text=True,
                    env=os.environ | ({"TASKD_CLUSTERD_CA": ""} if given else {}),
                )
                assert asked.returncode == 0, asked.stderr
                assert "mine" in asked.stdout

    asyncio.run(main())
    DLRecoverManager.instance = None


def test_all_invalid_certificate_files_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clusterd_credentials(clusterd_tls_from_environment()) is None
    with pytest.raises(SettingsError) as wrong:
        clusterd_credentials(ClusterdTlsSettings(crt="some.pem"))
    assert len(wrong.value.problems) == 2
    (tmp_path / "notes").write_text("no certificate")
    with pytest.raises(SettingsError, match="notes' is not a PEM file"):
        clusterd_credentials(ClusterdTlsSettings(ca=str(tmp_path / "notes")))
    monkeypatch.setenv("TASKD_CLUSTERD_CA", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="absent' cannot be read"):
        DLRecoverManager(pb.ClientInfo(), "127.0.0.1:1")
