"""Pages, JSON, sign-in and actions, against a real clusterd."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn

from taskd.clusterd import interceptors
from taskd.clusterd.auth import Tokens
from taskd.dashboard import dashboard, http_requests, job_api, views
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from taskd.runtime.tokens import ClientToken
from taskd.wire._pb import control_pb2 as pb
from tests.integration.clusterd.client import WAIT_S, Client
from tests.integration.clusterd.test_hostile_numbers import LEAST, MOST, hostile_progress
from tests.integration.dashboard.pages import Pages, opened, progress

HOSTILE = '<script>alert("x")</script>/../&?#'


def test_nothing_is_shown_without_a_session() -> None:
    async def check() -> None:
        async with opened() as pages:
            for path in ("/", "/jobs/job", "/jobs/job/nodes", "/jobs/job/incidents/1"):
                answer = await pages.browser.get(path)
                assert (answer.status_code, answer.headers["location"]) == (303, "/login")
            for path in ("/api/v1/jobs", "/api/v1/jobs/job", "/api/v1/jobs/job/events"):
                assert (await pages.browser.get(path)).status_code == 401
            assert (await pages.browser.post("/api/v1/jobs/job/actions/fault")).status_code == 401

    asyncio.run(check())


def test_every_answer_forbids_inline_scripts_and_frames() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            for path in ("/", "/login", "/static/main.js", "/api/v1/jobs", "/nowhere"):
                headers = (await pages.browser.get(path)).headers
                policy = headers["content-security-policy"]
                assert "default-src 'none'; script-src 'self'" in policy
                assert "unsafe" not in policy
                assert "frame-ancestors 'none'" in policy
                assert headers["x-content-type-options"] == "nosniff"
                assert "access-control-allow-origin" not in headers

    asyncio.run(check())


def test_wrong_token_is_refused_and_attempts_are_limited() -> None:
    async def check() -> None:
        async with opened() as pages:
            codes = [(await pages.sign_in("guess")).status_code for _ in range(15)]
            assert set(codes) == {403}
            answer = await pages.sign_in("boss")
            assert (answer.status_code, "too many attempts" in answer.text) == (403, True)

    asyncio.run(check())


def test_clusterd_without_tokens_is_shown_only_to_those_with_the_printed_key() -> None:
    async def check() -> None:
        async with opened(tokens=None) as pages:
            assert (await pages.sign_in("anything")).status_code == 403
            answer = await pages.browser.get(f"/login?key={pages.dashboard.key}")
            assert answer.status_code == 303
            assert "HttpOnly" in answer.headers["set-cookie"]
            assert "SameSite=strict" in answer.headers["set-cookie"]
            assert (await pages.browser.get("/api/v1/jobs/job")).json()["health"] == "training"

    asyncio.run(check())


def test_token_of_a_job_sees_its_job_only_and_may_do_nothing() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("key")
            jobs = (await pages.browser.get("/api/v1/jobs")).json()["jobs"]
            assert [job["job"] for job in jobs] == ["job"]
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 200
            refused = await pages.act("fault", ranks="1", confirmed=True)
            assert refused.status_code == 403
            await pages.sign_in("other")
            for path in ("", "/incidents", "/nodes", "/ranks", "/carpet", "/events"):
                answer = await pages.browser.get(f"/api/v1/jobs/job{path}")
                assert answer.status_code == 403, path

    asyncio.run(check())


def test_requests_of_other_sites_are_refused() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            path, key = "/api/v1/jobs/job/actions/fault", await pages.key()
            body: dict[str, Any] = {"ranks": "1", "confirmed": True}
            attempts: list[dict[str, str]] = [
                {},
                {"x-taskd-key": "wrong"},
                {**key, "origin": "http://evil.example"},
                {**key, "origin": "null"},
            ]
            for headers in attempts:
                answer = await pages.browser.post(path, json=body, headers=headers)
                assert answer.status_code == 403
            form = await pages.browser.post(path, data={"ranks": "1"}, headers=key)
            assert form.status_code == 415
            renamed = await pages.browser.get("/", headers={"host": "evil.example:8790"})
            assert renamed.status_code == 421
            assert (await pages.job.status()).line.state == "Idle"

    asyncio.run(check())


def test_action_is_confirmed_done_and_written_to_the_journal_with_who_did_it() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss", "ada")
            settings = {"ranks": "3", "because": "smells burnt"}
            asked = await pages.act("fault", **settings)
            assert asked.json() == {"confirm": "report a process fault of rank 3: smells burnt"}
            assert (await pages.job.status()).line.state == "Idle"
            done = await pages.act("fault", **settings, confirmed=True)
            assert done.status_code == 200
            state = await pages.job.status()
            assert state.line.state == "Stopping"
            assert state.faults[0].evidence == "reported by ada: smells burnt"
            lines = [line.because for line in await pages.job.history()]
            assert "ada: report a process fault of rank 3: smells burnt" in lines

    asyncio.run(check())


def test_refused_action_is_written_to_the_journal_as_refused() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss", "ada")
            answer = await pages.act("fault", ranks="77", confirmed=True)
            assert answer.status_code == 409
            reason = answer.json()["error"]
            assert reason.startswith("the job has no rank 77")
            lines = [line.because for line in await pages.job.history()]
            assert f"ada: report a process fault of rank 77: refused: {reason}" in lines

    asyncio.run(check())


def test_printed_link_of_a_dashboard_without_a_token_says_why_it_shows_nothing() -> None:
    async def check() -> None:
        async with opened() as pages:
            pages.dashboard.token = ClientToken()
            answer = await pages.browser.get(f"/login?key={pages.dashboard.key}")
            assert answer.status_code == 403
            assert "started without a valid token" in answer.text

    asyncio.run(check())


def test_drained_node_is_left_and_not_repaired_in_place() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            refused = await pages.act("drain", node="0", confirmed=True)
            assert (refused.status_code, "manager runs on node 0" in refused.text) == (409, True)
            signals = await pages.job.subscribe()
            await pages.act("drain", node="1", because="new disk", confirmed=True)
            await pages.job.stopped((await signals.next()).uuid)
            await pages.job.offer("recover", uuid=(await signals.next()).uuid)
            order = await signals.next("changeStrategy")
            assert order.changeStrategy == "recover"
            assert list(order.nodeRankIds) == ["1"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("POST", {"content": b"{"}),
        ("POST", {"content": b"[1]"}),
        ("POST", {"content": b"[" * 50_000}),
        ("POST", {"content": b"x" * 100_000}),
    ],
)
def test_damaged_requests_are_refused(method: str, request_: dict[str, Any]) -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            headers = {**await pages.key(), "content-type": "application/json"}
            path = "/api/v1/jobs/job/actions/fault"
            answer = await pages.browser.request(method, path, headers=headers, **request_)
            assert answer.status_code in (400, 413)

    asyncio.run(check())


def test_job_with_a_hostile_name_has_pages() -> None:
    async def check() -> None:
        async with opened(job=HOSTILE) as pages:
            await pages.sign_in("boss")
            (line,) = (await pages.browser.get("/api/v1/jobs")).json()["jobs"]
            assert line["job"] == HOSTILE
            path = quote(quote(HOSTILE, safe=""), safe="")
            shown = (await pages.browser.get(f"/api/v1/jobs/{path}")).json()
            assert (shown["job"], shown["step"]) == (HOSTILE, 41)
            page = await pages.browser.get(f"/jobs/{path}")
            assert "<script>alert" not in page.text

    asyncio.run(check())


async def events(pages: Pages, number: int, seen: list[str]) -> None:
    feed = pages.dashboard.feeds["job"]
    async for event in feed.events(lambda: True):
        name = event.partition(b"\n")[0].decode()
        if name.startswith("event: "):
            seen.append(name.removeprefix("event: "))
        if b'"step":43' in event:
            return


def test_fifty_pages_cost_clusterd_one_subscription() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            await pages.browser.get("/api/v1/jobs/job")
            owner = pages.server.jobs.get("job")
            assert owner is not None
            seen: list[list[str]] = [[] for _ in range(50)]
            readers = [
                asyncio.create_task(events(pages, number, names))
                for number, names in enumerate(seen)
            ]
            before = pages.dashboard.feeds["job"].updates
            await pages.job.code("PublishProgress", progress("job", "parked", 42))
            await pages.job.code("PublishProgress", progress("job", "training", 43))
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*readers)
            assert len(owner._watchers) == 1
            assert pages.dashboard.feeds["job"].updates - before <= 2
            assert all(names[0] == "snapshot" and "job" in names for names in seen)

    asyncio.run(check())


async def recovered(job: Client) -> None:
    signals = await job.subscribe()
    await job.fault(3)
    await job.stopped((await signals.next()).uuid)
    await job.offer("recover", uuid=(await signals.next()).uuid)
    await job.result("recover", uuid=(await signals.next("changeStrategy")).uuid)
    report = pb.IncidentReport(
        job="job",
        incident=1,
        outcome="recovered",
        phases=[pb.Phase(name="seen", at_unix_ms=1), pb.Phase(name="step", took_ms=5.0)],
        faults=[pb.IncidentFault(rank=3, node=1, cause="exited", evidence="signal 9")],
    )
    assert await job.code("ReportIncident", report) == 0


def test_incident_and_end_of_the_job_reach_an_open_page() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            await pages.browser.get("/api/v1/jobs/job")
            feed = pages.dashboard.feeds["job"]
            stream = feed.events(lambda: True)
            await anext(stream)
            await recovered(pages.job)
            async with asyncio.timeout(WAIT_S):
                async for event in stream:
                    name, _, data = event.partition(b"\ndata: ")
                    if name != b"event: job":
                        continue
                    found = json.loads(data)["job"]["incidents"]
                    if found and found[0]["title"] == "rank 3 exited: signal 9":
                        break
                await pages.job.code("EndJob", pb.JobEnd(job="job", because="all ranks finished"))
                async for event in stream:
                    if event.startswith(b"event: end"):
                        break
            assert feed.contact == views.ENDED
            shown = (await pages.browser.get("/api/v1/jobs/job")).json()
            assert shown["health"] == "done"
            incident = await pages.browser.get("/api/v1/jobs/job/incidents/1")
            assert incident.json()["faults"][0]["evidence"] == "signal 9"
            assert (await pages.browser.get("/api/v1/jobs/job/incidents/9")).status_code == 404

    asyncio.run(check())


def test_lost_clusterd_leaves_the_last_state_on_the_page() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            await pages.browser.get("/api/v1/jobs/job")
            feed = pages.dashboard.feeds["job"]
            stream = feed.events(lambda: True)
            await anext(stream)
            await pages.server.grpc.stop(0)
            async with asyncio.timeout(WAIT_S):
                async for event in stream:
                    if b'"health":"unknown"' in event:
                        break
            assert feed.view()["step"] == 41
            assert (await pages.browser.get("/api/v1/jobs")).status_code == 503

    asyncio.run(check())


def test_streams_end_with_the_server() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            await pages.browser.get("/api/v1/jobs/job")
            stream = pages.dashboard.feeds["job"].events(lambda: True)
            await anext(stream)
            pages.dashboard.end_events()
            async with asyncio.timeout(WAIT_S):
                rest = [event.partition(b"\n")[0] async for event in stream]
            assert rest == [b"event: job"]

    asyncio.run(check())


def test_signed_out_session_gets_no_more_events() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            await pages.browser.get("/api/v1/jobs/job")
            signed_in = True
            stream = pages.dashboard.feeds["job"].events(lambda: signed_in)
            await anext(stream)
            gone = await pages.browser.delete("/api/v1/session", headers=await pages.key())
            assert gone.status_code == 200
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 401
            signed_in = False
            assert [event async for event in stream] == []

    asyncio.run(check())


def test_session_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "ALLOWED_S", 0.0)

    async def check() -> None:
        scopes = {"boss": "operator", "key": "job:job"}
        async with opened(Tokens(scopes)) as pages:
            await pages.sign_in("key")
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 200
            del scopes["key"]
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 403
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 401

    asyncio.run(check())


def test_stream_of_events_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "ALLOWED_S", 0.0)

    async def check() -> None:
        scopes = {"boss": "operator", "key": "job:job"}
        async with opened(Tokens(scopes)) as pages:
            await pages.sign_in("key")
            (key,) = pages.dashboard.sessions._open
            session = pages.dashboard.sessions.get(key)
            assert session is not None
            feed = await pages.dashboard.feed(session, "job")
            events = job_api._while_allowed(pages.dashboard, session, key, feed)
            assert (await anext(events)).startswith(b"event: snapshot")
            del scopes["key"]
            await pages.job.code("PublishProgress", progress("job", step=42))
            async with asyncio.timeout(WAIT_S):
                assert [event async for event in events] == []

    asyncio.run(check())


def test_page_stays_open_when_the_token_of_the_dashboard_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "ALLOWED_S", 0.0)
    monkeypatch.setattr(interceptors, "REVOKED_S", 0.05)
    file = tmp_path / "token"
    file.write_text("old\n")

    async def check() -> None:
        scopes = {"boss": "operator", "old": "operator"}
        async with opened(Tokens(scopes)) as pages:
            pages.dashboard.token = ClientToken(file=str(file))
            await pages.browser.get(f"/login?key={pages.dashboard.key}")
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 200
            scopes["chief"] = "operator"
            file.write_text("chief\n")
            del scopes["old"]
            assert (await pages.browser.get("/api/v1/jobs/job")).status_code == 200
            async for tried in Tries(every(0.05), at_most=600):
                await pages.job.code("PublishProgress", progress("job", step=77 + tried))
                answer = await pages.browser.get("/api/v1/jobs/job")
                assert answer.status_code == 200
                if tried > 10 and answer.json()["step"] > 80:
                    return
            raise AssertionError("the page does not follow the job any more")

    asyncio.run(check())


def test_very_long_numbers_in_addresses_are_not_found() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            for number in ("9" * 5_000, "-1", "٣", "1e3"):
                for path in ("/api/v1/jobs/job/incidents/", "/api/v1/jobs/job/incidents/0"):
                    answer = await pages.browser.get(f"{path}{quote(number)}")
                    assert answer.status_code == 404, answer.text
                page = await pages.browser.get(f"/jobs/job/incidents/{quote(number)}")
                assert page.status_code == 200

    asyncio.run(check())


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/"]
)
def test_files_beside_the_pages_cannot_be_read(path: str) -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            assert (await pages.browser.get(path)).status_code in (404, 405)

    asyncio.run(check())


def test_another_site_cannot_sign_a_person_in_with_its_token() -> None:
    async def check() -> None:
        async with opened() as pages:
            answer = await pages.browser.get("/login?key=other")
            assert (answer.status_code, answer.headers.get("set-cookie")) == (403, None)
            assert (await pages.browser.get("/api/v1/jobs")).status_code == 401

    asyncio.run(check())


def test_guesses_of_others_do_not_lock_out_the_printed_link() -> None:
    async def check() -> None:
        async with opened() as pages:
            for _ in range(15):
                await pages.sign_in("guess")
            assert (await pages.sign_in("boss")).status_code == 403
            answer = await pages.browser.get(f"/login?key={pages.dashboard.key}")
            assert answer.status_code == 303

    asyncio.run(check())


def test_names_of_operators_are_one_line() -> None:
    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss", "ada\x1b[2J\nforged: line")
            who = (await pages.browser.get("/api/v1/session")).json()["who"]
            assert who == "ada\\x1b[2J\\nforged: line"

    asyncio.run(check())


def test_impossible_numbers_of_one_job_do_not_break_the_pages_of_all() -> None:
    def not_json(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    async def check() -> None:
        async with opened() as pages:
            for number, whole in ((math.nan, MOST), (-math.inf, LEAST)):
                await pages.job.code("PublishProgress", hostile_progress(number, whole))
                await pages.sign_in("boss")
                at = "/api/v1/jobs/job"
                for path in ("/api/v1/jobs", at, f"{at}/nodes", f"{at}/ranks", f"{at}/carpet"):
                    answer = await pages.browser.get(path)
                    assert answer.status_code == 200, path
                    json.loads(answer.text, parse_constant=not_json)

    asyncio.run(check())


def test_session_has_a_limit_of_open_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_api, "MOST_STREAMS", 2)

    async def check() -> None:
        async with opened() as pages:
            await pages.sign_in("boss")
            (cookie,) = pages.browser.cookies.values()
            pages.dashboard.streams[cookie] = 2
            answer = await pages.browser.get("/api/v1/jobs/job/events")
            assert (answer.status_code, "close one first" in answer.text) == (429, True)

    asyncio.run(check())


def test_connections_that_send_no_whole_request_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_requests, "REQUEST_S", 0.2)

    dropped = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await dropped.wait()  # an open request is not dropped, however long it takes
        await send({"type": "http.response.body", "body": b"whole"})

    async def check() -> None:
        config = uvicorn.Config(
            answer, port=0, lifespan="off", log_level="error", http=http_requests.HttpConnection
        )
        web = uvicorn.Server(config)
        serving = asyncio.create_task(web.serve())
        async for _ in Tries(every(0.01), deadline=monotonic() + WAIT_S):
            if web.started:
                break
        port = web.servers[0].sockets[0].getsockname()[1]

        async def received_for(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            async with asyncio.timeout(WAIT_S):
                received = await reader.read()
            writer.close()
            return received

        try:
            head = b"GET / HTTP/1.1\r\nHost: here\r\n"
            served = asyncio.create_task(received_for(head + b"Connection: close\r\n\r\n"))
            dropped_ones = await asyncio.gather(received_for(b""), received_for(head))
            assert not any(dropped_ones)
            dropped.set()
            assert b"whole" in await served
        finally:
            web.should_exit = True
            await serving

    asyncio.run(check())
