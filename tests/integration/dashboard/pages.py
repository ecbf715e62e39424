"""A dashboard of a real clusterd, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from taskd.bus.security import ClusterdTlsSettings
from taskd.clusterd.auth import Tokens
from taskd.clusterd.main import Server, ServerConfig
from taskd.dashboard.clusterd_link import ClusterdLink
from taskd.dashboard.dashboard import Dashboard
from taskd.dashboard.page_security import HostNames
from taskd.dashboard.web_server import application
from taskd.runtime.tokens import ClientToken
from taskd.wire._pb import control_pb2 as pb
from tests.integration.clusterd.client import Client, started

BASE = "http://127.0.0.1:8790"
TOKENS = Tokens({"boss": "operator", "key": "job:job", "other": "job:other"})


@dataclass
class Pages:
    server: Server
    job: Client
    dashboard: Dashboard
    browser: httpx.AsyncClient

    async def sign_in(self, token: str, name: str = "ada") -> httpx.Response:
        return await self.browser.post("/login", data={"token": token, "name": name})

    async def key(self) -> dict[str, str]:
        """The header that a request must have to change something."""
        session = (await self.browser.get("/api/v1/session")).json()
        return {"x-taskd-key": session["key"]}

    async def act(self, action: str, job: str = "job", **settings: object) -> httpx.Response:
        path = f"/api/v1/jobs/{job}/actions/{action}"
        return await self.browser.post(path, json=settings, headers=await self.key())


@asynccontextmanager
async def opened(
    tokens: Tokens | None = TOKENS, job: str = "job", only_job: str = ""
) -> AsyncIterator[Pages]:
    async with started(ServerConfig(tokens=tokens), job=job, token="boss") as (server, client):
        await client.declare("recover-in-place", "recover", nodes=2, per_node=2)
        await client.join()
        await client.code("PublishProgress", progress(job))
        dashboard = Dashboard(
            connect=lambda: ClusterdLink(server.address, ClusterdTlsSettings()),
            hosts=HostNames("127.0.0.1"),
            token=ClientToken("boss" if tokens else ""),
            only_job=only_job,
        )
        app = application(dashboard)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url=BASE, timeout=30) as browser,
        ):
            yield Pages(server, client, dashboard, browser)


def progress(job: str, phase: str = "training", step: int = 41) -> pb.JobProgress:
    return pb.JobProgress(
        job=job,
        step=step,
        steps_per_s=3.5,
        world=4,
        goodput=0.9,
        ranks=[pb.RankStatus(rank=r, node=r // 2, host="here", phase=phase) for r in range(4)],
        nodes=[pb.NodeStatus(node=n, present=True, ranks=2, leader=n == 0) for n in range(2)],
    )
