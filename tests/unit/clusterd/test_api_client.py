"""Credentials for the API server that cannot be made: programs, token files, certificates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from taskd.clusterd.kubernetes.api_client import ApiFailed, from_environment
from taskd.errors import SettingsError

EXEC = "client.authentication.k8s.io/v1beta1"


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(user: dict[str, object]) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(body))

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return write


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ({"exec": {"apiVersion": EXEC, "command": "false"}}, "Exec false returned 1"),
        ({"exec": {"apiVersion": EXEC, "command": "true"}}, "Expecting value"),
        ({"exec": {"apiVersion": "v9", "command": "true"}}, "v9 not implemented"),
        ({"tokenFile": "/absent/token"}, "Token file /absent/token not found"),
    ],
)
def test_missing_credentials_are_a_failed_request(
    user: dict[str, object], why: str, kubeconfig: Any
) -> None:
    """It is tried again: a task that watches must not end because a login has expired."""
    kubeconfig(user)

    async def main() -> None:
        api = from_environment()
        with pytest.raises(ApiFailed, match=why) as failed:
            await api.request("GET", "api")
        assert failed.value.unreachable
        with pytest.raises(ApiFailed, match=why):
            async with api.watch("api/v1/pods", "1"):
                raise AssertionError
        await api.close()

    asyncio.run(main())


def test_certificate_that_is_missing_is_a_settings_error(kubeconfig: Any) -> None:
    kubeconfig({"client-certificate": "/absent/cert", "client-key": "/absent/key"})
    with pytest.raises(SettingsError, match="No such file"):
        from_environment()
