"""When `taskd run` starts an etcd of its own, and when its nodes choose that together."""

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
    ("words", "starts", "chooses"),
    [
        (("--nnodes=1",), False, False),
        (("--nnodes=2",), False, False),
        (("--nnodes=2", "--spare"), False, False),
        (("--nnodes=2", "--etcd=own"), True, False),
        (("--nnodes=3",), False, True),
        (("--nnodes=2:4",), False, True),
        (("--nnodes=3", "--spare"), False, True),
        (("--nnodes=3", "--witness"), False, True),
        (("--nnodes=3", "--etcd=own"), True, False),
        (("--nnodes=3", "--etcd=host:2379"), False, False),
        (("--nnodes=3", "--clusterd=host:8899", "--etcd=own"), True, False),
    ],
)
def test_three_nodes_choose_and_others_are_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], starts: bool, chooses: bool
) -> None:
    found = read(monkeypatch, *words)
    assert (found.starts_etcd, found.chooses_etcd) == (starts, chooses)


@pytest.mark.parametrize("word", ["--etcd=none", "--clusterd=host:8899", "--state-dir=/state"])
def test_reason_against_an_etcd_is_said_by_every_node(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """A node that kept silent would make node 0 wait for it."""
    found = read(monkeypatch, "--nnodes=3", word)
    assert found.chooses_etcd
    assert found.etcd_off.startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    "words",
    [
        ("--nnodes=1", "--witness", "--etcd=own"),
        ("--nnodes=2", "--witness"),
        ("--nnodes=3", "--witness", "--etcd=none"),
        ("--nnodes=3", "--witness", "--etcd=host:2379"),
    ],
)
def test_witness_needs_the_jobs_own_etcd(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError, match="--witness"):
        read(monkeypatch, *words)
