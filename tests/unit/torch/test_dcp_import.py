"""torch/dcp.py: a module is changed as soon as the script imports it, and not imported before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taskd.torch.dcp import AfterImport


def test_function_is_called_when_the_module_has_been_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("ready = True")
    (tmp_path / "something_else.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[bool] = []
    finder = AfterImport("imported_late", lambda: seen.append(sys.modules["imported_late"].ready))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    __import__("something_else")
    assert seen == []
    __import__("imported_late")
    assert seen == [True]
    assert finder not in sys.meta_path


def test_missing_module_raises_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = AfterImport("no_such_module_of_ours", lambda: None)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_ours"):
        __import__("no_such_module_of_ours")
