from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from taskd.config import load
from taskd.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    stop_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.stop_timeout_s <= 0:
            raise ValueError("stop_timeout_s must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    listen: str
    nodes: int
    quiet: bool = False
    limit: int | None = None
    recovery: Inner = field(default_factory=Inner)


def test_the_environment_becomes_typed_settings() -> None:
    environ = {
        "TASKD_LISTEN": "0.0.0.0:1",
        "TASKD_NODES": "2",
        "TASKD_QUIET": "on",
        "TASKD_LIMIT": "7",
        "TASKD_RECOVERY_STOP_TIMEOUT_S": "5",
    }
    loaded = load(Settings, environ)
    assert loaded == Settings(
        listen="0.0.0.0:1", nodes=2, quiet=True, limit=7, recovery=Inner(stop_timeout_s=5.0)
    )


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        load(Settings, {"TASKD_NODES": "two", "TASKD_QUIET": "perhaps"})
    assert raised.value.problems == [
        "TASKD_LISTEN is not set",
        "TASKD_NODES must be int, got 'two'",
        "TASKD_QUIET must be bool, got 'perhaps'",
    ]


def test_a_value_out_of_range_names_its_group() -> None:
    environ = {"TASKD_LISTEN": "x", "TASKD_NODES": "1", "TASKD_RECOVERY_STOP_TIMEOUT_S": "-1"}
    with pytest.raises(SettingsError, match=r"TASKD_RECOVERY_\*: stop_timeout_s must be positive"):
        load(Settings, environ)
