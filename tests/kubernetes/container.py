"""Runs a container of a pod as processes: its own network, PIDs, host name, mounts and rights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT
from tests.kubernetes.control_plane import Json
from tests.kubernetes.pod_network import PodAddress

INIT = Path(__file__).with_name("container_init.py")


@dataclass(frozen=True)
class Image:
    """What a container image would bring: a directory to work in, and the programs in it. The
    other programs are ours."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/image",
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": "/tmp",
            "LANG": os.environ.get("LANG", "C.UTF-8"),
        }


@dataclass(frozen=True)
class Container:
    running: subprocess.Popen[bytes]

    def signal(self, number: int) -> None:
        """To its first process, as a kubelet does."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            return

    def kill(self) -> None:
        """The end of its first process ends all others."""
        self.signal(signal.SIGKILL)
        if not self.pids():
            self.running.kill()

    def pids(self) -> list[int]:
        """As the machine sees them; the first process first."""
        pids, at = [self.running.pid], 0
        while at < len(pids):
            with suppress(OSError):
                for thread in Path(f"/proc/{pids[at]}/task").iterdir():
                    pids += [int(pid) for pid in (thread / "children").read_text().split()]
            at += 1
        return pids[1:]

    def execute(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` does."""
        first = self.pids()[0]
        found = Path(f"/proc/{first}/environ").read_text().rstrip("\0").split("\0")
        into = ["nsenter", f"--target={first}", "--mount", "--pid", "--net", "--uts", "--ipc"]
        return subprocess.run(
            [*into, "--root", "--wd", "--", *words],
            env=dict(item.split("=", 1) for item in found),
            capture_output=True,
            text=True,
            timeout=120,
        )


def start(
    container: Json,
    *,
    image: Image,
    env: dict[str, str],
    mounts: list[tuple[Path, str]],
    address: PodAddress,
    hostname: str,
    pod_security: Json,
    root: Path,
    log: Path,
) -> Container:
    root.mkdir(parents=True, exist_ok=True)
    security = {**pod_security, **(container.get("securityContext") or {})}
    words = [*container["command"], *(container.get("args") or ())]
    about = {
        "root": str(root),
        "programs": [sys.base_prefix, str(ROOT), sys.prefix],
        "mounts": [(str(source), target) for source, target in [*mounts, (image.folder, "/image")]],
        "read_only": bool(security.get("readOnlyRootFilesystem")),
        "hostname": hostname,
        "directory": "/image",
        "user": security.get("runAsUser", 0),
        "command": [expanded(word, env) for word in words],
        "env": {**image.env, **env, "HOSTNAME": hostname},
    }
    command = [
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("nsenter", f"--net={address.path}", "--"),
        *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--"),
        *(sys.executable, "-I", str(INIT), json.dumps(about)),
    ]
    with log.open("ab") as output:
        running = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Container(running)


def expanded(text: str, env: dict[str, str]) -> str:
    """$(NAME), as Kubernetes expands it; $$ is a dollar sign, unknown names stay."""
    return re.sub(
        r"\$\$|\$\(([\w.-]+)\)",
        lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]),
        text,
    )
