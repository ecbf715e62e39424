"""No module unpickles what another process has sent, except through the seal.

Unpickling runs code. torch's object collectives unpickle whatever their peer sends, and gloo does
not know who its peer is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

SOURCES = ROOT / "src"
SEALED = SOURCES / "taskd/torch/state/sealed.py"
"""The only module that may unpickle: it checks the seal first."""
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
LOADERS = {"load", "loads", "Unpickler"}
PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNNING = {"eval"}


def test_only_the_seal_unpickles_what_another_process_has_sent() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {what}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != SEALED
        for line, what in unpickling(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_gather_object(out, mine)",
        "from torch.distributed import broadcast_object_list",
        "import pickle\npickle.loads(data)",
        "import pickle as p\np.loads(data)",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "connection = multiprocessing.connection.Client(address)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_rule_finds(code: str) -> None:
    assert list(unpickling(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\ncopy = pickle.loads(pickle.dumps(mine))",
        "import torch\ntorch.load(path, weights_only=True)",
        "import json\njson.loads(text)",
        "module.eval()",
    ],
)
def test_rule_accepts(code: str) -> None:
    assert not list(unpickling(ast.parse(code)))


def unpickling(tree: ast.AST) -> Iterator[tuple[int, str]]:
    modules = set(PICKLING)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {one.asname for one in node.names if one.asname and one.name in PICKLING}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if one.name in OBJECT_COLLECTIVES or (
                    node.module in PICKLING and one.name in LOADERS
                ):
                    yield node.lineno, one.name
        elif isinstance(node, ast.Call) and (what := forbidden(node, modules)):
            yield node.lineno, what


def forbidden(call: ast.Call, modules: set[str]) -> str:
    match call.func:
        case ast.Name(id=name) if name in OBJECT_COLLECTIVES | RUNNING:
            return name
        case ast.Attribute(attr=name) if name in OBJECT_COLLECTIVES:
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
            return f"{module}.{name}" if name in LOADERS and not copies(call) else ""
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            return "" if has(call, "weights_only", True) else "torch.load"
        case ast.Attribute(value=ast.Attribute(attr="connection"), attr="Client" | "Listener"):
            return "multiprocessing.connection"
        case _:
            pass
    return "allow_pickle" if has(call, "allow_pickle", True) else ""


def copies(call: ast.Call) -> bool:
    """`pickle.loads(pickle.dumps(x))` copies a value of this process."""
    inner = call.args[0] if len(call.args) == 1 else None
    return (
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr == "dumps"
    )


def has(call: ast.Call, name: str, value: bool) -> bool:
    return any(
        one.arg == name and isinstance(one.value, ast.Constant) and one.value.value is value
        for one in call.keywords
    )


def test_sources_are_found() -> None:
    assert Path(SEALED).is_file()
