from __future__ import annotations

import getpass
import os

import pytest

from taskd.commands.connection import user_name


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found"), OSError("no user name")])
def test_user_without_a_name_is_named_by_number(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert user_name() == f"user {os.getuid()}"
