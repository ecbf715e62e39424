"""The node that leads the job is lost, with manager, clusterd, store and two ranks. Nothing stops.

Three nodes with two ranks each and a spare node, all on this machine, and an etcd that keeps what
must survive: who leads, and what was decided. Needs the program `etcd` (Debian: etcd-server).

python examples/11_lose_node_zero.py
"""

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from watched import HERE, TASKD, TIMEOUT_S, Job, compare, free_port, say, training

STEPS = 100
PACE_S = 0.05
NODES, RANKS = 3, 2


def start_etcd(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("etcd")
    if program is None:
        raise SystemExit("this example needs etcd: apt-get install etcd-server")
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    listens = ["--listen-client-urls", client, "--advertise-client-urls", client]
    peers = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    one = ["--name", "a", "--initial-cluster", f"a={peer}", "--data-dir", f"{folder}/etcd"]
    started = subprocess.Popen(
        [program, *one, *listens, *peers, "--log-level", "error"], stderr=subprocess.DEVNULL
    )
    return started, client.removeprefix("http://")


print(f"{NODES * RANKS} ranks on one node, undisturbed", flush=True)
with training("train_ddp.py", STEPS, PACE_S / 10, ranks=NODES * RANKS) as job:
    undisturbed = job.end()

print(f"{NODES} nodes and a spare; the launcher of node 0 is killed", flush=True)
with ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    etcd, address = start_etcd(folder)
    stack.callback(etcd.wait)
    stack.callback(etcd.kill)
    name = f"example-{os.getpid()}"
    ports = ["--master-port", str(free_port()), "--manager-port", str(free_port())]
    common = [TASKD, "run", "--etcd", address, "--job-id", name, "--nnodes", str(NODES), *ports]
    script = [str(HERE / "train_ddp.py"), str(STEPS), str(PACE_S)]
    environment = {**os.environ, "TASKD_TOKEN": os.urandom(16).hex()}
    nodes: list[subprocess.Popen[str]] = []
    outputs = [Path(folder) / f"node{node}" for node in range(NODES + 1)]
    for node, output in enumerate(outputs):
        own = ["--node-rank", str(node), *(["--spare"] if node == NODES else [])]
        words = [*common, "--nproc-per-node", str(RANKS), *own, *script]
        file = stack.enter_context(output.open("w"))
        target = subprocess.PIPE if node == 0 else file
        nodes.append(
            subprocess.Popen(
                words, stdout=target, stderr=subprocess.STDOUT, text=True, env=environment
            )
        )
        stack.callback(nodes[-1].wait)
        stack.callback(nodes[-1].kill)
    zero, *others = nodes
    assert zero.stdout is not None
    for line in zero.stdout:
        say(line.rstrip())
        if "taskd status" in line:
            break
    view = Job(zero, name, []).at_step(20)
    zero.kill()
    zero.stdout.close()
    say(f"SIGKILL to node 0, which leads, at step {view['line']['step']}")
    codes = [other.wait(TIMEOUT_S) for other in others]
    text = "".join(output.read_text() for output in outputs[1:])

for line in re.findall(r"taskd: (node \d leads.*)", text)[:1] + re.findall(r"incident 1:.*", text):
    say(line)
if any(codes):
    raise SystemExit(f"the job ended with {codes}: {text}")
compare(re.findall(r"weights (\w+)", text)[-1], undisturbed)
