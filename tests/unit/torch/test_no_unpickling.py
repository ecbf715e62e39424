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
LOADERS = {"load", "loads", "Unpickler", "_loads", "_load", "_Unpickler"}
PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNNING = {"eval", "exec", "__import__"}
SCRIPT = SOURCES / "taskd/agent/zygote/program.py"
"""It runs the user's own script, by `exec`."""
SCRIPTS_OBJECTS = SOURCES / "taskd/torch/groups/object_broadcast.py"
"""It wraps torch's function for scripts that call it, and does not call it for itself."""
CHECKPOINT = SOURCES / "taskd/torch/checkpoints/emergency_checkpoint.py"
"""It checks owner, mode, links and signature before torch unpickles the metadata."""
UNPICKLING_MODULES = {"multiprocessing", "concurrent.futures.process", "torch.distributed.rpc"}
"""Their queues, pipes and calls unpickle whatever their peer sends."""
TORCH_INTERNALS = {"_tensor_to_object", "_object_to_tensor", "unsafe_load", "unsafe_load_all"}
LOADS_CHECKPOINT = "torch.distributed.checkpoint.state_dict_loader"


def test_only_the_seal_unpickles_what_another_process_has_sent() -> None:
    allowed = {
        SCRIPT: {"exec"},
        CHECKPOINT: {LOADS_CHECKPOINT},
        SCRIPTS_OBJECTS: {"broadcast_object_list"},
    }
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {what}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != SEALED
        for line, what in unpickling(ast.parse(path.read_text()))
        if what not in allowed.get(path, ())
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
        "exec(text)",
        "import pickle\nread = pickle.loads",
        "import pickle\ngetattr(pickle, name)(data)",
        "import pickle\nclass Reader(pickle.Unpickler): pass",
        "import torch\ntorch.serialization.load(path)",
        "from torch import load",
        "from torch.serialization import load",
        "import torch\nread = torch.load",
        "from torch.distributed.distributed_c10d import _tensor_to_object",
        "dist.distributed_c10d._tensor_to_object(data, size, None)",
        "import multiprocessing",
        "from multiprocessing import Queue",
        "import torch.multiprocessing as mp",
        "from torch.distributed import rpc",
        "from concurrent.futures import ProcessPoolExecutor",
        "yaml.unsafe_load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "from torch.distributed.checkpoint import state_dict_loader",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state, checkpoint_id=path)",
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
    pickles, torches, dcps = set(PICKLING), {"torch", "serialization"}, {"dcp", "checkpoint"}
    copying: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.asname and one.name in PICKLING:
                    pickles.add(one.asname)
                if one.asname and one.name == "torch":
                    torches.add(one.asname)
        elif isinstance(node, ast.Call) and (copies(node) or has(node, "weights_only", True)):
            copying.add(node.func)  # a copy of a value of this process, or no code in it
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                yield from ((line, one.name) for one in names if unpickles(one.name))
            case ast.ImportFrom(module=str(module), names=names):
                for one in names:
                    if what := imported(module, one.name):
                        yield line, what
            case ast.Name(id=name) if name in OBJECT_COLLECTIVES | TORCH_INTERNALS:
                yield line, name
            case ast.Attribute(attr=name) if name in OBJECT_COLLECTIVES | TORCH_INTERNALS:
                yield line, name
            case ast.Attribute(value=owner, attr=name) if node not in copying:
                last = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if (last in pickles and name in LOADERS) or (last in torches and name == "load"):
                    yield line, f"{last}.{name}"
                elif last in dcps and name in ("load", "load_state_dict"):
                    yield line, LOADS_CHECKPOINT
            case ast.Call():
                if what := called(node, pickles):
                    yield line, what
            case _:
                pass


def imported(module: str, name: str) -> str:
    if name in OBJECT_COLLECTIVES | TORCH_INTERNALS | {"ProcessPoolExecutor"}:
        return name
    if module in PICKLING and name in LOADERS:
        return f"{module}.{name}"
    if module in ("torch", "torch.serialization") and name == "load":
        return "torch.load"
    whole = f"{module}.{name}"
    if LOADS_CHECKPOINT in (module, whole):
        return LOADS_CHECKPOINT
    return whole if unpickles(module) or unpickles(whole) else ""


def unpickles(module: str) -> bool:
    if module == "torch.multiprocessing" or module.startswith("torch.multiprocessing."):
        return True
    return any(module == one or module.startswith(f"{one}.") for one in UNPICKLING_MODULES)


def called(call: ast.Call, pickles: set[str]) -> str:
    match call.func:
        case ast.Name(id=name) if name in RUNNING:
            return name
        case ast.Name(id="getattr") if call.args and isinstance(call.args[0], ast.Name):
            return "getattr of pickle" if call.args[0].id in pickles else ""
        case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "load_all"):
            return "" if is_safe_loader(call) else "yaml.load"
        case ast.Attribute(value=ast.Attribute(attr="connection"), attr="Client" | "Listener"):
            return "multiprocessing.connection"
        case _:
            pass
    return "allow_pickle" if has(call, "allow_pickle", True) else ""


def is_safe_loader(call: ast.Call) -> bool:
    """`LOADER` is a name of our own for yaml's safe one."""
    return any(
        one.arg == "Loader" and isinstance(one.value, ast.Name) and one.value.id == "LOADER"
        for one in call.keywords
    )


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
