"""Reads JSON that other processes, users or tenants have written: too deep a nesting is an error.

Python fails with RecursionError, which is not a ValueError, when a text has some hundred levels:
as soon as it is read, or only when what was read is written again. No text of ours has more than a
dozen levels, so `loads` refuses such texts like any other invalid one.
"""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 64


def loads(text: str | bytes) -> Any:
    """Raises ValueError if it is not JSON, or has more than `MOST_LEVELS` levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    opened = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opened)) > MOST_LEVELS:  # type: ignore[arg-type]
        _check_levels(value)
    return value


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it has more than {MOST_LEVELS} levels")
