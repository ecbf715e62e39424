"""Checks JSON output against the schemas in docs/reference/schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests import ROOT

SCHEMAS = ROOT / "docs/reference/schema"


def schema(command: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{command}.json").read_text())
    return loaded


def check(command: str, text: str) -> Any:
    """Parse the output of a command. Fields that the schema does not describe are errors here."""
    output = json.loads(text)
    jsonschema.validate(output, _closed(schema(command)), jsonschema.Draft202012Validator)
    return output


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(one) for one in part]
    if not isinstance(part, dict):
        return part
    closed = {key: _closed(value) for key, value in part.items()}
    return closed | {"additionalProperties": False} if "properties" in part else closed
