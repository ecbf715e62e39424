"""Requests to the Kubernetes API server, and the errors they end with.

lightkube reads the kubeconfig or the service account, and makes the connection: TLS, tokens that
are read again when they expire, exec plugins. Bodies stay JSON: the rest of clusterd reads objects
that other programs have written, and must keep what it does not know.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from taskd.errors import SettingsError, TaskdError
from taskd.wire.json_reading import loads

try:
    import httpx2
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams
    from lightkube.config.kubeconfig import KubeConfig, SingleConfig
    from lightkube.core.exceptions import ConfigError
except ImportError as missing:
    raise SettingsError(
        ["--cluster kubernetes needs lightkube: pip install 'taskd[kubernetes]'"]
    ) from missing

Json = dict[str, Any]

REQUEST_S = 10.0
"""How long a request may take; a list, per page."""
WATCH_S = 60
"""How long a watch runs. A connection that has silently broken is noticed a little later."""
MERGE_PATCH = "application/merge-patch+json"
NOT_FOUND, CONFLICT = 404, 409
NO_CREDENTIALS = (ConfigError, json.JSONDecodeError)
"""A program that makes tokens has failed, or a token file is missing: perhaps only now."""
NOT_REACHED = (httpx2.HTTPError, httpx2.StreamError, OSError, *NO_CREDENTIALS)


class ApiFailed(TaskdError):
    """The API server refused the request, failed, or was not reached (code 0)."""

    def __init__(self, code: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s

    @property
    def unreachable(self) -> bool:
        """The same request may succeed later."""
        return self.code == 0 or self.code == 429 or self.code >= 500


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects, as its path begins and ends."""

    group: str
    """api/v1 or apis/GROUP/VERSION"""
    plural: str
    page: int = 500
    """How many of them to list at once."""

    def path(self, namespace: str = "", name: str = "") -> str:
        where = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.group}{where}/{self.plural}{f'/{name}' if name else ''}"


PODS = Resource("api/v1", "pods")
NODES = Resource("api/v1", "nodes")
CONFIG_MAPS = Resource("api/v1", "configmaps", page=25)  # each may have 1 MiB
POD_GROUPS = Resource("apis/scheduling.volcano.sh/v1beta1", "podgroups")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")


def from_environment() -> ApiClient:
    """With the service account inside a cluster, else with KUBECONFIG or ~/.kube/config."""
    try:
        config = KubeConfig.from_env().get()
    except ConfigError as error:
        raise SettingsError([f"cannot find the Kubernetes API server: {error}"]) from error
    assert config is not None  # `get` without a default raises instead
    try:
        return ApiClient(config)
    except OSError as error:
        raise SettingsError([f"cannot use the Kubernetes credentials: {error}"]) from error


class ApiClient:
    def __init__(self, config: SingleConfig) -> None:
        timeout = httpx2.Timeout(REQUEST_S)
        self._http = AsyncClient(config, ConnectionParams(timeout=timeout))

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        **params: str,
    ) -> Json:
        content = None if body is None else json.dumps(body).encode()
        try:
            response = await self._http.request(
                method,
                path,
                params=params,
                content=content,
                headers={"Content-Type": content_type} if content is not None else None,
            )
        except NOT_REACHED as error:
            raise _not_reached(error) from error
        _check(response, response.content)
        return _parsed(response.content)

    @asynccontextmanager
    async def watch(
        self, path: str, version: str
    ) -> AsyncIterator[AsyncIterator[tuple[str, Json]]]:
        """The changes since a version, until the server ends the watch."""
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = httpx2.Timeout(REQUEST_S, read=WATCH_S + REQUEST_S)
        try:
            async with self._http.stream("GET", path, params=params, timeout=timeout) as response:
                if response.status_code != 200:
                    _check(response, await response.aread())
                yield _events(lines(response.aiter_bytes()))
        except NOT_REACHED as error:
            raise _not_reached(error) from error


async def lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Only a newline ends a line: objects may contain all other characters that httpx splits at.

    Raises ApiFailed if the last line is not complete.
    """
    begun: list[bytes] = []
    async for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    if any(begun):
        raise ApiFailed(0, "the API server has closed the watch in the middle of a line")


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Json]]:
    async for line in lines:
        if line:
            event = _parsed(line)
            body = event.get("object")
            yield str(event.get("type", "")), body if isinstance(body, dict) else {}


def _not_reached(error: Exception) -> ApiFailed:
    if isinstance(error, NO_CREDENTIALS):
        return ApiFailed(0, f"cannot authenticate to the API server: {error}")
    return ApiFailed(0, f"cannot reach the API server: {str(error) or type(error).__name__}")


def _parsed(text: bytes) -> Json:
    try:
        body = loads(text)
    except ValueError as error:
        raise ApiFailed(0, f"the API server's answer is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiFailed(0, "the API server's answer is not a JSON object")
    return body


def _check(response: httpx2.Response, content: bytes) -> None:
    if response.is_success:
        return
    try:
        message = str(loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    after = response.headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdecimal() and len(after) < 5 else 0.0
    code = response.status_code
    raise ApiFailed(code, message or f"HTTP status {code}", retry_after_s)
