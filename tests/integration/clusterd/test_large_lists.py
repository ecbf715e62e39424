"""ConfigMaps of others, perhaps gigabytes of them, do not fill the memory of clusterd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests import ROOT

LARGE, MIB = 150, 2**20
TEXT = "x" * (MIB - 2000)
FOLLOW = """
import asyncio, resource
from random import Random
from taskd.clusterd.kubernetes.api_client import from_environment
from taskd.clusterd.kubernetes.cluster import KubernetesCluster

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

async def main():
    api = from_environment()
    cluster = KubernetesCluster(api, Random(0))
    before = peak()
    await cluster.start()
    print(peak() - before)
    await cluster.close()
    await api.close()

asyncio.run(main())
"""


class _ApiServer(BaseHTTPRequestHandler):
    """Lists, as an API server answers them; there are no other objects than large ConfigMaps."""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        count = LARGE if asked.path == "/api/v1/configmaps" else 0
        begin = int(query.get("continue", 0))
        end = min(count, begin + int(query.get("limit", count)))
        items = [
            {"metadata": {"namespace": "n", "name": f"c{number}"}, "data": {"text": TEXT}}
            for number in range(begin, end)
        ]
        more = str(end) if end < count else ""
        body = {"metadata": {"resourceVersion": "1", "continue": more}, "items": items}
        text = b"" if "watch" in query else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ApiServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        body = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {"token": "test"}}],
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(body))
        yield tmp_path / "kubeconfig"
        server.shutdown()


def test_only_one_page_of_a_list_is_in_memory(kubeconfig: Path) -> None:
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW], env=env, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < LARGE, "it grew by less than the objects have"
