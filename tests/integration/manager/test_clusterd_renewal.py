"""The manager and clusterd while certificates and tokens are renewed: nothing is lost."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

from taskd.bus.security import ClusterdTlsSettings, Tls
from taskd.bus.tls_files import TlsFiles
from taskd.clusterd.auth import TokenFile
from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import FaultReport, Signal
from taskd.model.faults import Fault
from taskd.model.ids import Rank
from taskd.wire._pb import control_pb2 as control
from tests.integration.certificates import Authority
from tests.integration.clusterd.client import WAIT_S

JOB = "mine"


class Files:
    """The files of clusterd and of the manager, which an operator replaces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokens, self.token = folder / "tokens", folder / "token"
        for one in (self.tokens, self.token):
            one.touch(mode=0o600)
        names = ("ca", "server_key", "server_crt", "key", "crt")
        self.paths = {name: folder / name for name in names}

    def install(self, authority: Authority, token: str) -> None:
        server, own = authority.issue("clusterd"), authority.issue(f"job:{JOB}")
        sources = (str(authority.ca), *server, *own)
        for path, source in zip(self.paths.values(), sources, strict=True):
            shutil.copy(source, path)
        self.tokens.write_text(f"job:{JOB} {token}\n")
        self.token.write_text(f"{token}\n")

    def server(self, listen: str) -> ServerConfig:
        paths = {name: str(path) for name, path in self.paths.items()}
        tls = Tls(ca="", server_key=paths["server_key"], server_crt=paths["server_crt"])
        return ServerConfig(
            listen=listen, tls=tls, tokens=TokenFile(self.tokens), journal=self._folder / "journal"
        )

    def manager(self) -> ManagerConfig:
        paths = {name: str(self.paths[name]) for name in ("ca", "crt", "key")}
        return ManagerConfig(
            job_id=JOB,
            clusterd_tls=ClusterdTlsSettings(**paths),
            clusterd_token_file=str(self.token),
            rpc_timeout_s=2.0,
        )


class Manager:
    """A client with a subscription, and what it has received."""

    def __init__(self, address: str, config: ManagerConfig) -> None:
        self.client = ClusterdClient(address, config)
        self.client.declaration = control.JobDeclaration(job=JOB, strategies=["recover"])
        self.signals: asyncio.Queue[Signal] = asyncio.Queue()
        self.subscribed = asyncio.Event()
        listen = self.client.listen(self.signals.put_nowait, self.subscribed.set)
        self._tasks = [asyncio.create_task(one) for one in (listen, self.client.deliver())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()


async def start(stack: AsyncExitStack, files: Files, listen: str = "127.0.0.1:0") -> Server:
    return await stack.enter_async_context(serve(files.server(listen)))


def test_manager_follows_new_certificates_and_tokens(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.install(Authority(tmp_path, "old"), "first")

    async def scenario() -> None:
        async with asyncio.timeout(8 * WAIT_S):
            async with AsyncExitStack() as stack:
                server = await start(stack, files)
                address = server.address
                manager = Manager(address, files.manager())
                await manager.subscribed.wait()
            # clusterd is away. Its operator renews everything, in several steps.
            manager.subscribed.clear()
            manager.client.report(FaultReport((Fault(Rank(1)),)))
            files.paths["key"].write_text("half written")
            await asyncio.to_thread(files.install, Authority(tmp_path, "new"), "second")
            async with AsyncExitStack() as stack:
                await start(stack, files, address)
                await manager.subscribed.wait()
                while (await manager.signals.get()).type != "stopTrain":
                    pass
                await manager.close()

    asyncio.run(scenario())


def test_token_is_read_for_each_call(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.install(Authority(tmp_path, "one"), "first")

    async def scenario() -> None:
        async with asyncio.timeout(8 * WAIT_S), AsyncExitStack() as stack:
            server = await start(stack, files)
            manager = Manager(server.address, files.manager())
            await manager.subscribed.wait()
            files.tokens.write_text(f"job:{JOB} second\n")
            assert not await manager.client.report_incident(control.IncidentReport(job=JOB))
            files.token.write_text("second")
            assert await manager.client.report_incident(control.IncidentReport(job=JOB))
            files.token.unlink()
            assert await manager.client.report_incident(control.IncidentReport(job=JOB))
            await manager.close()

    asyncio.run(scenario())


def test_channel_is_opened_again_while_a_half_written_key_lies_there(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.install(Authority(tmp_path, "one"), "first")

    async def scenario() -> None:
        async with asyncio.timeout(8 * WAIT_S), AsyncExitStack() as stack:
            server = await start(stack, files)
            used = TlsFiles.of(files.manager().clusterd_tls)
            files.paths["key"].write_text("half written")
            assert not used.are_renewed()
            async with used.channel(server.address, ()) as channel:
                await channel.channel_ready()

    asyncio.run(scenario())
