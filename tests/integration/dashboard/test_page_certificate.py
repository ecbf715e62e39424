"""The page's own certificate is renewed while the page is served."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import sys
from pathlib import Path

from taskd.clusterd.main import ServerConfig, serve
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests.integration.certificates import Authority

WAIT_S = 60.0


def test_new_connections_get_the_new_certificate(tmp_path: Path) -> None:
    key, crt = tmp_path / "page.key", tmp_path / "page.crt"
    pairs = [Authority(tmp_path, name).issue("localhost") for name in ("old", "new")]
    shown = [ssl.PEM_cert_to_DER_cert(Path(certificate).read_text()) for _, certificate in pairs]

    def put(pair: tuple[str, str]) -> None:
        shutil.copy(pair[0], key)
        shutil.copy(pair[1], crt)

    def certificate_at(port: int) -> bytes:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))

    async def scenario() -> None:
        put(pairs[0])
        async with serve(ServerConfig()) as server:
            words = ["--server", server.address, "--listen", "127.0.0.1:0"]
            page = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taskd", "dashboard", *words),
                *("--tls-key", str(key), "--tls-cert", str(crt)),
                stderr=asyncio.subprocess.PIPE,
            )
            assert page.stderr is not None
            try:
                found = re.search(rb"https://127.0.0.1:(\d+)/", await page.stderr.readline())
                assert found is not None
                port = int(found[1])
                async for _ in Tries(every(0.1), deadline=monotonic() + WAIT_S):
                    try:
                        assert await asyncio.to_thread(certificate_at, port) == shown[0]
                        break
                    except OSError:
                        continue  # it does not accept connections yet
                crt.write_text(crt.read_text()[:100])
                assert b"is not used" in await asyncio.wait_for(page.stderr.readline(), WAIT_S)
                assert await asyncio.to_thread(certificate_at, port) == shown[0]
                put(pairs[1])
                async for _ in Tries(every(0.2), deadline=monotonic() + WAIT_S):
                    if await asyncio.to_thread(certificate_at, port) == shown[1]:
                        return
                raise AssertionError("the old certificate is still in use")
            finally:
                page.terminate()
                await page.wait()

    asyncio.run(scenario())
