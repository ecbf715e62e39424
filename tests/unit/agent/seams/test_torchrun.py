"""Which torch the seam takes over; any other is left as it is, and the log says why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher

from taskd.agent.seams import torchrun


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is assigned, torch is itself again afterwards."""
    monkeypatch.setattr(launcher, "LocalElasticAgent", LocalElasticAgent)


def test_this_torch_is_known() -> None:
    assert torchrun.install()
    assert getattr(launcher, "LocalElasticAgent") is torchrun.ElasticAgent  # noqa: B009 - final


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.5.1+cu121", "torch 2.5.1+cu121 is older than 2.6"),
        ("1.13.0", "torch 1.13.0 is older than 2.6"),
        ("nightly", "torch 'nightly' is of no version that can be read"),
    ],
)
def test_a_torch_of_an_unknown_version_is_left_alone(
    version: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert getattr(launcher, "LocalElasticAgent") is LocalElasticAgent  # noqa: B009 - final
    assert f"torchrun is left as it is: {why}" in caplog.text


@pytest.mark.parametrize("version", ["3.0a0", "2.14.0.dev20261101"])
def test_a_newer_torch_with_the_same_seam_is_known(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torchrun.install()


def test_a_torch_without_a_launcher_of_ours_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(launcher, "LocalElasticAgent")
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert "has no LocalElasticAgent in its launcher" in caplog.text


def test_a_torch_with_another_agent_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simple = LocalElasticAgent.__mro__[1]
    monkeypatch.delattr(simple, "_rendezvous")
    with caplog.at_level(logging.ERROR):
        assert not torchrun.install()
    assert "has no _rendezvous" in caplog.text
