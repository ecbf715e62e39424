"""The adapter for Lightning touches no private name that is not in its table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from taskd.integrations.lightning_names import NAMES
from tests import ROOT

FOLDER = ROOT / "src/taskd/integrations"
SOURCES = [one for one in FOLDER.glob("lightning*.py") if one.name != "lightning_names.py"]
CODE = "".join(one.read_text() for one in SOURCES)
LISTED = {part for one in NAMES for part in (one.name, one.owner.rpartition(":")[2])}


def test_every_private_name_is_listed() -> None:
    nodes = [node for one in SOURCES for node in ast.walk(ast.parse(one.read_text()))]
    own = {name for node in nodes for name in defined(node)}
    used = {
        name for node in nodes for name in mentioned(node) if re.fullmatch("_[a-zA-Z]\\w+", name)
    }
    assert len(used & LISTED) > 20
    assert used - own - LISTED == set()


@pytest.mark.parametrize("name", sorted({one.name for one in NAMES}))
def test_every_listed_name_is_used(name: str) -> None:
    assert re.search(rf"\b{name}\b", CODE)


def mentioned(node: ast.AST) -> Iterator[str]:
    """Attributes, arguments, imports, and names in strings."""
    match node:
        case ast.Attribute():
            yield node.attr
        case ast.keyword(arg=str(name)) | ast.alias(name=name) | ast.Constant(value=str(name)):
            yield name
        case _:
            pass


def defined(node: ast.AST) -> Iterator[str]:
    """Functions, and attributes that objects of the adapter set on themselves."""
    match node:
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            yield node.attr
        case _:
            pass
