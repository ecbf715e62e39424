"""Which torch `taskd run` starts with, warns about, or refuses before any rank starts."""

from __future__ import annotations

import pytest

from taskd.agent.run import torch_check
from taskd.errors import UnknownTorch
from taskd.runtime.torch_versions import TESTED


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, trial: str = "") -> None:
    monkeypatch.setattr(torch_check, "installed_torch", lambda: version)
    monkeypatch.setattr(torch_check, "TRIAL", trial)


@pytest.mark.parametrize("version", [None, *TESTED, f"{TESTED[0]}+cu128", "2.13.0a0+git1234"])
def test_tested_version_starts_without_a_trial(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version, "raise SystemExit('not needed')")
    assert torch_check.check() == ""


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu121", "nightly"])
def test_too_old_or_unreadable_version_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    with pytest.raises(UnknownTorch) as refusal:
        torch_check.check()
    assert str(refusal.value).startswith(f"torch {version} is not supported. Install torch ")


def test_newer_version_that_passes_the_trial_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "2.99.0")
    assert torch_check.check().startswith("torch 2.99.0 is newer than the tested versions")


def test_newer_version_that_fails_the_trial_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = "import sys; print('a warning', file=sys.stderr); sys.exit('no split_group')"
    install(monkeypatch, "2.99.0", trial)
    with pytest.raises(UnknownTorch) as refusal:
        torch_check.check()
    assert str(refusal.value) == "torch 2.99.0 does not work with this TaskD: no split_group"
