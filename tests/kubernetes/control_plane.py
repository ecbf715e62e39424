"""A real Kubernetes control plane for tests: etcd, API server, controller manager, scheduler.

There is no kubelet: `node.py` plays one. All processes end with the test run, by their pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

Json = dict[str, Any]

ADMIN = "admin-token"
START_S = 300.0
APPLY = "application/apply-patch+yaml"


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Audited:
    verb: str
    resource: str
    namespace: str
    """Empty: all of them."""
    denied: bool


@dataclass
class ControlPlane:
    url: str
    ca: Path
    folder: Path
    api_server: list[str]
    """Its command line."""
    running: subprocess.Popen[bytes]
    """The API server."""
    etcd: str
    """The URL of its etcd."""
    token: str = ADMIN

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def restart(self) -> None:
        """Kill the API server and start it again, with the same data.

        After SIGTERM it would wait for the watches of its clients.
        """
        end(self.running, signal.SIGKILL)
        self.start()

    def start(self) -> None:
        self.running = spawn(self.folder / "kube-apiserver.log", self.api_server)
        eventually(lambda: _is_ready(self), START_S, f"see {self.folder}/kube-apiserver.log")

    def audit_length(self) -> int:
        """How many requests there were so far."""
        return len(self._audit_log())

    def _audit_log(self) -> list[str]:
        return (self.folder / "audit.log").read_text().splitlines()

    def audited(self, user: str, earlier: int) -> set[Audited]:
        """All requests of a user, without those that there were earlier."""
        found = set()
        for line in self._audit_log()[earlier:]:
            event = json.loads(line)
            if event["user"]["username"] == user:
                what, status = event.get("objectRef") or {}, event.get("responseStatus") or {}
                found.add(
                    Audited(
                        event["verb"],
                        what.get("resource", ""),
                        what.get("namespace", ""),
                        status.get("code") == 403,
                    )
                )
        return found

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content_type: str = "application/json",
        token: str = "",
    ) -> Json:
        """One call, as the administrator unless another token is given."""
        sent = urllib.request.Request(
            f"{self.url}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {token or self.token}",
                "Content-Type": content_type,
            },
        )
        context = ssl.create_default_context(cafile=str(self.ca))
        try:
            with urllib.request.urlopen(sent, timeout=30, context=context) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                found = error.read()
            try:
                message = json.loads(found)["message"]
            except (ValueError, KeyError, TypeError):
                message = found.decode(errors="replace")
            raise Refused(error.code, message) from None
        try:
            answered: Json = json.loads(text)
        except ValueError:
            return {"text": text.decode()}
        return answered

    def apply(self, body: Json, *, dry_run: bool = False) -> Json:
        """Server-side apply: unknown fields and wrong types are errors."""
        dry = "&dryRun=All" if dry_run else ""
        query = f"?fieldManager=test&force=true{dry}"
        return self.request("PATCH", object_path(body) + query, body, APPLY)

    def compact(self) -> None:
        """etcd forgets all versions but the newest."""
        found = self._etcd("range", {"key": "AA=="})
        self._etcd("compaction", {"revision": found["header"]["revision"], "physical": True})

    def _etcd(self, call: str, body: Json) -> Json:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.etcd}/v3/kv/{call}", data, timeout=30) as answer:
            answered: Json = json.loads(answer.read())
            return answered

    def kubeconfig(self, name: str, token: str = "", url: str = "") -> Path:
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {
                                "server": url or self.url,
                                "certificate-authority": str(self.ca),
                            },
                        }
                    ],
                    "users": [{"name": "test", "user": {"token": token or self.token}}],
                }
            )
        )
        return path

    def version(self) -> tuple[int, int]:
        found = self.request("GET", "version")
        major, minor, *_ = found["gitVersion"].removeprefix("v").split(".")
        return int(major), int(minor)


PLURALS = {
    "Ingress": "ingresses",
    "NetworkPolicy": "networkpolicies",
}
CLUSTER_WIDE = {
    "Namespace",
    "Node",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ClusterTrainingRuntime",
    "PersistentVolume",
}


def object_path(body: Json) -> str:
    version, kind, metadata = body["apiVersion"], body["kind"], body["metadata"]
    group = f"apis/{version}" if "/" in version else f"api/{version}"
    plural = PLURALS.get(kind, f"{kind.lower()}s")
    where = "" if kind in CLUSTER_WIDE else f"namespaces/{metadata.get('namespace', 'default')}/"
    return f"{group}/{where}{plural}/{metadata['name']}"


@contextmanager
def control_plane(
    assets: Path, folder: Path, *, controllers: bool = True, users: Sequence[str] = ()
) -> Iterator[ControlPlane]:
    """`users`: further administrators; the token of each is its name."""
    with ExitStack() as stack:
        etcd_port, peer_port, api_port = free_ports(3)
        etcd_url = f"http://127.0.0.1:{etcd_port}"
        stack.enter_context(
            process(
                folder / "etcd.log",
                [
                    str(assets / "etcd"),
                    f"--data-dir={folder / 'etcd'}",
                    f"--listen-client-urls={etcd_url}",
                    f"--advertise-client-urls={etcd_url}",
                    f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
                    "--unsafe-no-fsync",
                ],
            )
        )
        # Without controllers no namespace has a service account, which pods would need.
        options = () if controllers else ("--disable-admission-plugins=ServiceAccount",)
        (folder / "tokens.csv").write_text(
            "".join(
                f'{token},{user},{user},"system:masters"\n'
                for token, user in [(ADMIN, "admin"), *((user, user) for user in users)]
            )
        )
        plane = _api_server(assets, folder, etcd_url, api_port, stack, options)
        for program in ("kube-controller-manager", "kube-scheduler") if controllers else ():
            command = [
                str(assets / program),
                f"--kubeconfig={plane.kubeconfig(program)}",
                "--secure-port=0",
                "--leader-elect=false",
                # Older versions also have an insecure port; two control planes would share it.
                *(("--port=0",) if plane.version() < (1, 23) else ()),
            ]
            if program == "kube-controller-manager":
                command += [
                    f"--service-account-private-key-file={folder / 'sa.key'}",
                    f"--root-ca-file={plane.ca}",
                    "--use-service-account-credentials=true",
                    "--node-monitor-grace-period=16s",
                ]
            stack.enter_context(process(folder / f"{program}.log", command))
        yield plane


def _api_server(
    assets: Path, folder: Path, etcd_url: str, port: int, stack: ExitStack, options: Sequence[str]
) -> ControlPlane:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (folder / "sa.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    certificates = folder / "certificates"
    policy = folder / "audit.yaml"
    policy.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "omitStages": ["RequestReceived"],
                "rules": [{"level": "Metadata"}],
            }
        )
    )
    command = [
        str(assets / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={certificates}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={folder / 'audit.log'}",
        *options,
    ]
    running = spawn(folder / "kube-apiserver.log", command)
    plane = ControlPlane(
        f"https://127.0.0.1:{port}",
        certificates / "apiserver.crt",
        folder,
        command,
        running,
        etcd_url,
    )
    # After SIGTERM it would wait for the watches of its clients.
    stack.callback(lambda: end(plane.running, signal.SIGKILL))
    eventually(lambda: _is_ready(plane), START_S, f"see {folder / 'kube-apiserver.log'}")
    return plane


def _is_ready(plane: ControlPlane) -> bool:
    if not plane.ca.exists():
        return False
    try:
        return bool(plane.request("GET", "readyz")["text"] == "ok")
    except (Refused, OSError, ssl.SSLError):
        return False


def spawn(
    log: Path, command: list[str], env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process whose output is in the log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )


@contextmanager
def process(
    log: Path, command: list[str], env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs until the end of the context."""
    running = spawn(log, command, env)
    try:
        yield running
    finally:
        end(running)


def end(
    running: subprocess.Popen[bytes], number: int = signal.SIGTERM, wait_s: float = 20.0
) -> int:
    if running.poll() is None:
        running.send_signal(number)
    try:
        return running.wait(wait_s)
    except subprocess.TimeoutExpired:
        running.kill()
        return running.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def eventually(happened: Any, wait_s: float = 60.0, hint: str = "") -> Any:
    """Ask again until the answer is true; the answer."""
    deadline = time.monotonic() + wait_s
    while True:
        answer = happened()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not happen within {wait_s:g} s; {hint}")
        time.sleep(0.05)
