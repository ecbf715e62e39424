"""torch/compat: a torch that lacks a private name is refused; no other module uses one."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from taskd.errors import UnknownTorch
from taskd.runtime.private_names import PrivateName, check_torch, find_owner
from taskd.runtime.torch_versions import minor, supported_torch
from taskd.torch import compat
from taskd.torch.compat import distributed_checkpoint, recording
from tests import ROOT

SOURCES = ROOT / "src/taskd"
ALLOWED = {*(SOURCES / "torch/compat").glob("*.py"), SOURCES / "agent/seams/torch_names.py"}
OWN_OBJECTS = {"self", "cls"}
WITH_TORCH_OBJECTS = {"torch", "seams", "documented"}
"""Folders whose modules work on objects of torch, also without an import of it."""
OTHER_FRAMEWORKS = {"integrations"}
"""Their private attributes are those of Lightning and transformers, whose versions are checked."""
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
"""Names with an underscore that are part of a public API: of named tuples, and `os._exit`."""


INSTALLED = minor(torch.__version__)
NEEDED = [
    entry
    for module in pkgutil.iter_modules(compat.__path__, f"{compat.__name__}.")
    for table in vars(import_module(module.name)).values()
    if isinstance(table, tuple) and table and isinstance(table[0], PrivateName)
    for entry in table
    if entry.needed_by(INSTALLED)
]
"""What any table of the package lists."""
AT_START = [one for one in compat.EVERY_JOB if one.needed_by(INSTALLED)]


def without(hidden: PrivateName) -> Any:
    """Finds every owner, except that of one entry, which is empty."""

    def find(entry: PrivateName) -> Any:
        return object() if entry == hidden else find_owner(entry)

    return find


@pytest.mark.parametrize("hidden", AT_START, ids=str)
def test_init_refuses_a_torch_without(hidden: PrivateName) -> None:
    with pytest.raises(UnknownTorch) as refusal:
        compat.check(without(hidden))
    assert f"torch {torch.__version__} lacks {hidden}, which TaskD needs for " in str(refusal.value)
    assert hidden.purpose in str(refusal.value)
    assert f"Supported: {supported_torch()}" in str(refusal.value)


def test_name_of_another_version_is_not_looked_for() -> None:
    later = PrivateName("torch", "not_yet", "a test", since=(INSTALLED[0], INSTALLED[1] + 1))
    earlier = PrivateName("torch", "no_longer", "a test", until=INSTALLED)
    check_torch([later, earlier])
    with pytest.raises(UnknownTorch, match=r"lacks torch\.not_yet, which TaskD needs for a test"):
        check_torch([PrivateName("torch", "not_yet", "a test", since=INSTALLED)])


@pytest.mark.parametrize("hidden", recording.NAMES, ids=str)
def test_recording_refuses_a_torch_without(hidden: PrivateName) -> None:
    with pytest.raises(UnknownTorch, match="which TaskD needs for recording"):
        compat.check_profiling(without(hidden))


@pytest.mark.parametrize("hidden", distributed_checkpoint.SHARDED, ids=str)
def test_sharded_model_is_refused_by_a_torch_without(hidden: PrivateName) -> None:
    with pytest.raises(UnknownTorch) as refusal:
        compat.check_sharded(without(hidden))
    assert str(hidden) in str(refusal.value)


@pytest.mark.parametrize("hidden", distributed_checkpoint.CHECKPOINTS, ids=str)
def test_distributed_checkpoint_is_refused_by_a_torch_without(hidden: PrivateName) -> None:
    with pytest.raises(UnknownTorch) as refusal:
        compat.check_checkpoints(without(hidden))
    assert str(hidden) in str(refusal.value)


@pytest.mark.parametrize("hidden", NEEDED, ids=str)
def test_trial_of_an_untested_torch_looks_for(hidden: PrivateName) -> None:
    with pytest.raises(UnknownTorch) as refusal:
        compat.check_all(without(hidden))
    assert str(hidden) in str(refusal.value)


def test_installed_torch_has_every_name() -> None:
    compat.check_all()


def test_missing_owner_is_refused_except_that_of_nccl() -> None:
    def nothing(entry: PrivateName) -> Any:
        return None

    with pytest.raises(UnknownTorch) as refusal:
        compat.check(nothing)
    assert "ProcessGroupGloo" in str(refusal.value)
    assert "ProcessGroupNCCL" not in str(refusal.value)


@pytest.mark.parametrize(
    "path", sorted((SOURCES / "torch/compat").glob("*.py")), ids=lambda one: one.stem
)
def test_private_name_is_listed_where_it_is_used(path: Path) -> None:
    """In a table, or in a check that the module makes by itself."""
    tree = ast.parse(path.read_text())
    texts = [str(one.value) for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    listed = {word for text in texts for word in re.split(r"[^\w]+", text)}
    used = {name.split(".")[-1] for _, name in private_uses(path)}
    assert {name for name in used if is_hidden(name)} <= listed


def test_backend_numbers_its_collectives_without_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    compat.start_sequence(gloo)
    assert capfd.readouterr().err == ""


# Only the two tables touch private names of torch


def test_no_module_but_compat_touches_a_private_name_of_torch() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path not in ALLOWED
        for line, name in private_uses(path)
    ]
    assert found == []


def private_uses(path: Path) -> Iterator[tuple[int, str]]:
    """Private imports from torch; and in a module that imports torch, any `object._name`."""
    tree = ast.parse(path.read_text())
    imports = list(torch_imports(tree))
    yield from ((line, name) for line, name in imports if is_private(name))
    if path.parent.name in OTHER_FRAMEWORKS:
        return
    if imports or WITH_TORCH_OBJECTS & set(path.relative_to(SOURCES).parts):
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        yield from ((line, name) for line, name in attributes(tree) if name not in own | PUBLIC)


def torch_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if of_torch(one.name))
        elif isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names)


def of_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__future__" for part in name.split("."))


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private attributes of anything but the module's own objects, also by `getattr` and alike."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_hidden(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and by_name(node.func):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_hidden(str(name.value)):
                yield node.lineno, str(name.value)


def by_name(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in (
        "getattr",
        "setattr",
        "hasattr",
        "delattr",
    )


def is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in OWN_OBJECTS
