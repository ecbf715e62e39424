"""The lines of a watch, which arrive in blocks of any size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from taskd.clusterd.kubernetes.api_client import ApiFailed, lines


async def _blocks(text: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


async def _read(text: bytes, size: int) -> list[bytes]:
    return [line async for line in lines(_blocks(text, size))]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_only_a_newline_ends_a_line(size: int) -> None:
    """Python and httpx split at nine more characters; the API server sends them as they are."""
    bodies = [{"data": "a\x85b\u2028c\u2029d\x1ce\x7f"}, {"data": "\x0b中"}, {}]
    text = b"".join(json.dumps(body, ensure_ascii=False).encode() + b"\n" for body in bodies)
    assert [json.loads(line) for line in asyncio.run(_read(text, size))] == bodies


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_watch_that_ends_in_the_middle_of_a_line_has_failed(size: int) -> None:
    with pytest.raises(ApiFailed, match="middle of a line"):
        asyncio.run(_read(b'{"a": 1}\n{"b', size))


def test_empty_watch_has_no_lines() -> None:
    assert asyncio.run(_read(b"", 1)) == []
