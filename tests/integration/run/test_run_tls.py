"""`taskd run` on two nodes that authenticate with certificates only."""

from __future__ import annotations

from pathlib import Path

from taskd.runtime.address import free_port
from tests.integration.certificates import Authority
from tests.integration.run.run_job import Job, script


def test_nodes_join_with_mutual_tls_and_without_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
    path = script(tmp_path, "import os; print('rank', os.environ['RANK'], flush=True)")
    jobs = []
    for node in range(2):
        tls = authority.tls(f"node{node}", f"taskd://two/Proxy/{node}/*")
        files = {
            "TASKD_TLS_CA": tls.ca,
            "TASKD_TLS_SERVER_KEY": tls.server_key,
            "TASKD_TLS_SERVER_CRT": tls.server_crt,
            "TASKD_TLS_CLIENT_KEY": tls.client_key,
            "TASKD_TLS_CLIENT_CRT": tls.client_crt,
        }
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        words = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--rdzv-id=two"]
        jobs.append(Job(folder, *words, *ports, path, **files))
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0], ended
    assert "rank 1" in ended[1].out
