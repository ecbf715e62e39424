"""The trial of an untested torch: names first, then a step without peers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from taskd.errors import UnknownTorch
from taskd.torch import compat
from taskd.torch.startup import version_check, warmup


def test_installed_torch_passes() -> None:
    code = "from taskd.torch.startup.version_check import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_missing_name_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack() -> None:
        raise UnknownTorch("torch 2.99 lacks x")

    monkeypatch.setattr(compat, "check_all", lack)
    assert version_check.find_problem() == "UnknownTorch: torch 2.99 lacks x"


def test_step_that_fails_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Could not find the default backend\nfor Process Group taskd")

    monkeypatch.setattr(warmup, "train", fail)
    found = version_check.find_problem()
    assert found == "RuntimeError: Could not find the default backend for Process Group taskd"
