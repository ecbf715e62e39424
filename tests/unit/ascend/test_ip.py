from __future__ import annotations

import pytest

from taskd.python.utils.ip import pre_handle_ip


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("[10.0.0.1]", "10.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "[::]"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("2001:DB8::0:1", "[2001:DB8::0:1]"),
    ],
)
def test_addresses(given: str, answer: str) -> None:
    assert pre_handle_ip(given) == (answer, None)


@pytest.mark.parametrize("given", ["", None, "host", "1.2.3", "[[::1]]", "[::1", "1.2.3.4:80", 7])
def test_no_addresses(given: str | None) -> None:
    text, error = pre_handle_ip(given)
    assert text == ""
    assert isinstance(error, ValueError)
