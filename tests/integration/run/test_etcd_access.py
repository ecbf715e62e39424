"""`taskd run` with an etcd that requires a certificate, a user and a password."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from taskd.runtime.address import free_port
from taskd.runtime.retry import Tries, every
from tests.integration.certificates import Authority
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_node_zero import read_error


def require_users(etcd: EtcdServer, tls: ssl.SSLContext) -> None:
    for _ in Tries(every(0.1)):
        if "already exists" in etcd.call("auth/user/add", verify=tls, name="root", password="p"):
            break
    etcd.call("auth/user/grant", verify=tls, user="root", role="root")
    etcd.call("auth/enable", verify=tls)
    assert "revision" not in etcd.call("kv/range", verify=tls, key="YQ=="), "it refuses strangers"


def start(folder: Path, node: int, *words: str, **env: str) -> Job:
    home = folder / f"node{node}"
    home.mkdir()
    return Job(home, f"--node-rank={node}", *words, **env)


def test_next_manager_leads_in_an_etcd_with_certificates_and_passwords(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "etcd")
    (key, crt), (own_key, own_crt) = authority.issue("server"), authority.issue("client")
    options = (
        *(f"--cert-file={crt}", f"--key-file={key}", "--client-cert-auth", "--bcrypt-cost=4"),
        f"--trusted-ca-file={authority.ca}",
    )
    tls = ssl.create_default_context(cafile=str(authority.ca))
    tls.load_cert_chain(own_crt, own_key)
    access = {
        "TASKD_ETCD_CA": str(authority.ca),
        "TASKD_ETCD_CRT": own_crt,
        "TASKD_ETCD_KEY": own_key,
        "TASKD_ETCD_USER": "root",
        "TASKD_ETCD_PASSWORD": "p",
    }
    path = script(tmp_path, SAME)
    with running(tmp_path / "data", *options, scheme="https") as etcd:
        require_users(etcd, tls)
        job = [f"--job-id=access{os.getpid()}", "--nnodes=2", f"--etcd={etcd.client}"]
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        words = [*job, *ports, path, "0.2"]
        zero, one = (start(tmp_path, node, *words, **access) for node in range(2))
        zero.wait_for("step 5")
        zero.manager().kill()
        assert read_error(one, r"node \d leads the job since epoch (\d)")[1] == "2"
        ended = [launcher.end() for launcher in (zero, one)]
        assert [each.code for each in ended] == [0, 0], ended
