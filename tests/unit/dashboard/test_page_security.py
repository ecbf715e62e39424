from __future__ import annotations

import pytest

from taskd.dashboard.page_security import IDLE_S, HostNames, Sessions, cookie_of, same_origin
from taskd.runtime.tokens import ClientToken


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80", "localhost", "LOCALHOST:9", "[::1]:80", "a.example"]
)
def test_own_host_names_are_allowed(host: str) -> None:
    assert HostNames("127.0.0.1", ["a.example"]).allows(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil"]
)
def test_foreign_host_names_are_refused(host: str) -> None:
    assert not HostNames("127.0.0.1").allows(host)


def test_origin_must_be_ours_if_it_is_sent() -> None:
    assert same_origin("", "127.0.0.1:1")
    assert same_origin("http://127.0.0.1:1", "127.0.0.1:1")
    assert not same_origin("http://127.0.0.1:2", "127.0.0.1:1")
    assert not same_origin("null", "127.0.0.1:1")


def test_each_port_has_a_cookie_of_its_own() -> None:
    assert cookie_of("127.0.0.1:8790") != cookie_of("127.0.0.1:8791")


def test_idle_session_ends() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    key, session = sessions.begin(ClientToken("token"), "ada", "operator")
    assert sessions.get(key) is session
    now = IDLE_S + 1
    assert sessions.get(key) is None
    assert not sessions.is_open(key)
