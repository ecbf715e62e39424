"""A record that another program has written into the store must not take all memory."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.clusterd.records import packed_text
from taskd.clusterd.records.packed_text import pack, unpack


@given(st.text())
def test_text_comes_back(text: str) -> None:
    assert unpack(pack(text)) == text


def test_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_text, "LIMIT_BYTES", 1000)
    assert len(unpack(zlib.compress(bytes(1000)))) == 1000
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        unpack(zlib.compress(bytes(1001)))


def test_cut_text_is_refused() -> None:
    with pytest.raises(ValueError, match="cut off"):
        unpack(pack("some text")[:-5])
