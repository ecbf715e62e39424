"""What is accepted as an etcd, and what is refused with which reason."""

from __future__ import annotations

import pytest

from taskd.clusterd.etcd.etcd_settings import EtcdSettings, addresses, why_refused
from taskd.errors import SettingsError


@pytest.mark.parametrize("version", ["3.4.0", "3.4.23", "3.5.3", "3.5.16-rc.1", "3.6.1"])
def test_version_is_accepted(version: str) -> None:
    assert why_refused(version) == ""


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("3.5.0", "lose data"),
        ("3.5.1", "lose data"),
        ("3.5.2", "install 3.5.3"),
        ("3.3.27", "not supported"),
        ("4.0.0", "not supported"),
        ("", "unknown version"),
    ],
)
def test_version_is_refused(version: str, why: str) -> None:
    assert why in why_refused(version)


def test_addresses_are_a_list_without_repetition() -> None:
    assert addresses("a:1, b:2,a:1,") == ("a:1", "b:2")
    with pytest.raises(SettingsError, match="at least one"):
        addresses(" ,")
    with pytest.raises(SettingsError, match=r"'a'.*\n.*'b:x'"):
        addresses("a,b:x,c:1")


def test_half_of_a_pair_is_reported() -> None:
    problems = EtcdSettings(user="me", crt="file").problems()
    assert len(problems) == 3
    assert "secret" not in repr(EtcdSettings(user="me", password="secret"))
