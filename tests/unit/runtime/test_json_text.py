"""JSON that browsers can read, whatever a job reports."""

from __future__ import annotations

import json
import math
from typing import Any

from taskd.runtime.json_text import SPACED, dumps


def test_numbers_that_json_does_not_have_become_null() -> None:
    value: Any = {"a": [1.5, math.nan], "b": {"c": (math.inf, -math.inf)}, "d": "ö"}
    assert json.loads(dumps(value)) == {"a": [1.5, None], "b": {"c": [None, None]}, "d": "ö"}
    assert dumps({"d": "ö"}, ascii_only=True, separators=SPACED) == '{"d": "\\u00f6"}'
