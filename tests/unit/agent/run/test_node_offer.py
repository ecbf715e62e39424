"""What a node says that it has, before the job chooses whether it starts an etcd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from taskd.agent.etcd_member.etcd_binary import EtcdBinary, EtcdMemberSettings, NoEtcd
from taskd.agent.run.etcd_choice import offer_of
from taskd.core.etcd_choice import Offer
from tests.unit.agent.run.test_own_etcd_option import read

BINARY = EtcdBinary("/usr/bin/etcd", "3.4.23")


def offer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *words: str,
    binary: EtcdBinary | NoEtcd = BINARY,
    insecure: bool = False,
) -> Offer:
    plan = read(monkeypatch, "--nnodes=20", *words)
    folders = str(tmp_path), str(tmp_path)
    plan = replace(plan, token="" if insecure else plan.token)
    return offer_of(plan, folders, EtcdMemberSettings(), binary)


def test_node_with_everything_can_use_etcd_and_keep_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert offer(monkeypatch, tmp_path, "--node-rank=2") == Offer("node 2")


def test_spare_and_witness_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not offer(monkeypatch, tmp_path, "--spare").regular
    assert offer(monkeypatch, tmp_path, "--witness") == Offer("a witness", regular=False)


def test_node_without_etcd_uses_the_copies_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = offer(monkeypatch, tmp_path, binary=NoEtcd("it is not installed", "Install it"))
    assert found == Offer("node 0", cannot_keep="it is not installed. Install it")


def test_only_the_first_regular_nodes_keep_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not offer(monkeypatch, tmp_path, "--node-rank=7").cannot_keep
    assert offer(monkeypatch, tmp_path, "--node-rank=8").cannot_keep
    assert not offer(monkeypatch, tmp_path, "--spare", "--node-rank=21").cannot_keep


@pytest.mark.parametrize(
    ("words", "env", "because"),
    [
        (("--etcd=none",), {}, "--etcd none"),
        (("--clusterd=host:8899",), {}, "--clusterd"),
        (("--state-dir=/state",), {}, "--state-dir"),
        ((), {"TASKD_TLS_CA": "ca.pem"}, "TASKD_TLS_SERVER_KEY"),
    ],
)
def test_reason_why_a_node_cannot_use_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    env: dict[str, str],
    because: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert because in offer(monkeypatch, tmp_path, *words).cannot_use


def test_node_without_a_secret_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "TASKD_TOKEN" in offer(monkeypatch, tmp_path, insecure=True).cannot_use
    assert not offer(monkeypatch, tmp_path, "--etcd=own", insecure=True).cannot_use


def test_node_that_may_lead_with_tls_can_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CA", "SERVER_KEY", "SERVER_CRT"):
        monkeypatch.setenv(f"TASKD_TLS_{name}", "file.pem")
    assert not offer(monkeypatch, tmp_path).cannot_use


def test_etcd_that_was_asked_for_may_have_a_journal_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not offer(monkeypatch, tmp_path, "--etcd=own", "--state-dir=/state").cannot_use
