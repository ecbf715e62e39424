"""JSON as other programs read it: Python would write NaN and Infinity, which are not JSON."""

from __future__ import annotations

import json
import math
from typing import Any

COMPACT, SPACED = (",", ":"), (", ", ": ")


def dumps(value: Any, *, ascii_only: bool = False, separators: tuple[str, str] = COMPACT) -> str:
    """Numbers that do not exist in JSON become null: a job may report any."""
    try:
        return _dumps(value, ascii_only, separators)
    except ValueError:
        return _dumps(_finite(value), ascii_only, separators)


def _dumps(value: Any, ascii_only: bool, separators: tuple[str, str]) -> str:
    return json.dumps(value, ensure_ascii=ascii_only, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value
