"""Which torch versions the seam supports; others are left unchanged, and the log says why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher

from taskd.agent.seams import torchrun


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores torch after each test."""
    monkeypatch.setattr(launcher, "LocalElasticAgent", LocalElasticAgent)


def test_installed_torch_is_supported() -> None:
    assert torchrun.install()
    assert getattr(launcher, "LocalElasticAgent") is torchrun.ElasticAgent  # noqa: B009 - final


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.5.1+cu121", "torch 2.5.1+cu121 is too old. Supported: torch 2."),
        ("1.13.0", "torch 1.13.0 is too old. Supported: torch 2."),
        ("nightly", "cannot parse the version of torch 'nightly'"),
    ],
)
def test_unsupported_version_is_left_unchanged(
    version: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert getattr(launcher, "LocalElasticAgent") is LocalElasticAgent  # noqa: B009 - final
    assert f"torchrun is left unchanged: {why}" in caplog.text


@pytest.mark.parametrize("version", ["3.0a0", "2.99.0.dev20261101"])
def test_newer_torch_with_same_seam_is_supported(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torchrun.install()


def test_torch_without_local_elastic_agent_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(launcher, "LocalElasticAgent")
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert "lacks torch.distributed.launcher.api.LocalElasticAgent" in caplog.text


def test_torch_with_different_agent_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simple = LocalElasticAgent.__mro__[1]
    monkeypatch.delattr(simple, "_rendezvous")
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert "LocalElasticAgent._rendezvous, which TaskD needs" in caplog.text
