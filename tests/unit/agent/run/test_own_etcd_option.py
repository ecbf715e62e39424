"""When `taskd run` starts an etcd of its own."""

from __future__ import annotations

import argparse

import pytest

from taskd.agent.run import arguments, plan
from taskd.errors import SettingsError


def read(monkeypatch: pytest.MonkeyPatch, *words: str) -> plan.Plan:
    monkeypatch.setenv("TASKD_TOKEN", "secret")
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return plan.read(parser.parse_args([*words, "--no-python", "true"]))


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (("--nnodes=1",), False),
        (("--nnodes=2",), False),
        (("--nnodes=2", "--etcd=own"), True),
        (("--nnodes=3",), False),
        (("--nnodes=3", "--etcd=own"), True),
        (("--nnodes=3", "--etcd=host:2379"), False),
        (("--nnodes=3", "--clusterd=host:8899"), False),
        (("--nnodes=3", "--clusterd=host:8899", "--etcd=own"), True),
    ],
)
def test_job_starts_an_etcd_only_if_asked_to(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], starts: bool
) -> None:
    assert read(monkeypatch, *words).starts_etcd is starts


@pytest.mark.parametrize(
    "words", [("--nnodes=1", "--witness", "--etcd=own"), ("--nnodes=3", "--witness")]
)
def test_witness_needs_the_jobs_own_etcd(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError, match="--witness"):
        read(monkeypatch, *words)
