"""JSON of others: whatever is wrong with it, readers get a ValueError."""

from __future__ import annotations

import ast
import json

import pytest

from taskd.wire.json_reading import MOST_LEVELS, loads
from tests import ROOT

SOURCES = ROOT / "src"
READER = SOURCES / "taskd/wire/json_reading.py"


def nested(levels: int) -> str:
    return '[{"a":' * (levels // 2) + "[" * (levels % 2) + "]" * (levels % 2) + "}]" * (levels // 2)


@pytest.mark.parametrize("levels", [1, 2, MOST_LEVELS - 2, MOST_LEVELS])
def test_usual_depth_is_read(levels: int) -> None:
    text = nested(levels).replace(":}", ":1}")
    assert loads(text) == loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, nested(MOST_LEVELS + 1), "[", ""],
)
def test_too_deep_or_invalid_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"levels|Expecting"):
        loads(text)
    with pytest.raises(ValueError, match=r"levels|Expecting"):
        loads(text.encode())


def test_many_objects_beside_each_other_are_read() -> None:
    value = [{"a": [1]} for _ in range(1_000)]
    assert loads(json.dumps(value)) == value


def test_all_modules_read_json_in_this_way() -> None:
    """RecursionError is not a ValueError: one text of a tenant could stop a server."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != READER
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("loads", "load")
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    ]
    assert found == []
