"""How long a node waits for a manager before it ends."""

from __future__ import annotations

import pytest

from taskd.agent.node import workers_config
from tests.unit.agent.run.test_own_etcd_option import read


@pytest.mark.parametrize("etcd", ["own", "host:2379"])
def test_node_waits_longer_for_etcd_than_for_one_machine(
    monkeypatch: pytest.MonkeyPatch, etcd: str
) -> None:
    alone = workers_config(read(monkeypatch, "--nnodes=3"), 1.0)
    shared = workers_config(read(monkeypatch, "--nnodes=3", f"--etcd={etcd}"), 1.0)
    assert shared.lost_manager_s == shared.order_timeout_s > alone.lost_manager_s
