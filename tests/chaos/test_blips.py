"""Links that break for up to three seconds, or again and again: no node is lost, no step is lost.

Three machines made of network namespaces, without etcd; node 0 is cut off, too. With a spare, the
rank of a node that comes back must not live beside its successor. `TASKD_CHAOS_SEED` chooses the
lengths.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import sleep

import psutil
import pytest

from taskd.agent.run.plan import MANAGER_PORT
from taskd.config import environ
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests.integration import namespaces
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_half_jobs import Launcher
from tests.integration.run.test_node_zero import weights
from tests.integration.switched_machines import Machines, machines

NODES, STEPS = 3, 600
PATIENCE_S = 60.0
"""A node that does not come back costs 300 s."""
BLIP_S = (0.5, 3.0)
"""Shorter and longer than the time after which a node counts as silent."""
FLAP_S = (0.2, 0.8)
FLAPS = 5
SEED = int(environ.get("TASKD_CHAOS_SEED", "1"))
IN_PLACE = "retry,recover-in-place,recover"

pytestmark = [
    pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces"),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class Case:
    strategies: str
    blips: tuple[int, ...]
    """The nodes that are cut off, one after the other."""
    flaps: tuple[int, ...] = ()
    """The nodes whose link breaks again and again."""
    spares: int = 0
    port: int | None = None
    """Cut off from this port of the other machines only."""


@dataclass
class Blips:
    case: Case
    spaces: Machines
    nodes: list[Launcher]
    random: Random = field(default_factory=lambda: Random(SEED))

    def blip(self, node: int, length_s: float) -> None:
        if self.case.port is None:
            self.spaces.cut(node)
            sleep(length_s)
            self.spaces.join(node)
        else:
            self.spaces.cut_port(node, self.case.port)
            sleep(length_s)
            self.spaces.join_port(node, self.case.port)

    def disturb(self) -> None:
        for node in self.case.blips:
            length_s = self.random.uniform(*BLIP_S)
            self.blip(node, length_s)
            self.wait_for_progress(f"{length_s:.2f} s without node {node}")
        for node in self.case.flaps:
            length_s = self.random.uniform(*FLAP_S)
            for _ in range(FLAPS):
                self.blip(node, length_s)
                sleep(length_s)
            self.wait_for_progress(f"a link of node {node} that flapped every {length_s:.2f} s")

    def wait_for_progress(self, after: str) -> None:
        """All ranks train: one on each of the nodes that are not spares now."""
        reached = [len(node.out.read_text()) for node in self.nodes]
        for _ in Tries(every(0.1), deadline=monotonic() + PATIENCE_S):
            new = [one.out.read_text()[at:] for one, at in zip(self.nodes, reached, strict=True)]
            if sum(len(re.findall(r"step \d+\n", text)) >= 2 for text in new) >= NODES:
                return
            ended = [node.popen.poll() for node in self.nodes]
            assert not any(code is not None for code in ended), (after, self.errors())
        raise AssertionError(f"stuck after {after}: {self.errors()}")

    def ranks(self) -> list[str]:
        """Of the processes that run: two of one rank must never be left."""
        family = [
            process
            for node in self.nodes
            for process in psutil.Process(node.popen.pid).children(recursive=True)
        ]
        return sorted(one.name() for one in family if one.name().startswith("taskd:rank"))

    def errors(self) -> list[str]:
        return [one.err.read_text() for one in self.nodes]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(IN_PLACE, (1, 2, 1, 2, 0, 0), (1, 2, 0)), id="recover"),
        pytest.param(Case(IN_PLACE, (1, 2, 1), (2,), port=MANAGER_PORT), id="port"),
        pytest.param(Case("retry,recover", (1, 2, 3, 1), spares=1), id="spare"),
        # A job that has just grown waits before it grows again, longer each time.
        pytest.param(Case("retry,elastic-training", (1, 2)), id="elastic"),
    ],
)
def test_cut_links_cost_no_step(tmp_path: Path, case: Case) -> None:
    text = SAME.replace("job.steps(60)", f"job.steps({STEPS})")
    if "elastic" in case.strategies:
        text = text.replace("optimizer=optimizer)", "optimizer=optimizer, elastic='scale')")
    path = script(tmp_path, text.replace("float(sys.argv[1])", "float(open(sys.argv[1]).read())"))
    slow, fast = tmp_path / "pace", tmp_path / "fast"
    slow.write_text("0.1")
    fast.write_text("0")
    expected = weights(Job(tmp_path, f"--nproc-per-node={NODES}", path, str(fast)).end(120).out)
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(NODES + case.spares))
        words = (f"--nnodes={NODES}", f"--strategies={case.strategies}")
        own = {"etcd": "none"}
        nodes = []
        for node in range(NODES + case.spares):
            spare = ["--spare"] if node >= NODES else []
            launcher = Launcher(spaces, node, tmp_path, *words, *spare, path, str(slow), **own)
            stack.callback(launcher.close)
            nodes.append(launcher)
        for launcher in nodes[:NODES]:
            launcher.wait_for(r"step 2\n")
        blips = Blips(case, spaces, nodes)
        blips.disturb()
        for _ in Tries(every(0.1), deadline=monotonic() + PATIENCE_S):
            if len(blips.ranks()) <= NODES:
                break
        assert blips.ranks() == [f"taskd:rank{rank}" for rank in range(NODES)]
        fast.rename(slow)
        codes = [one.popen.wait(PATIENCE_S) for one in nodes]
        errors = "".join(blips.errors())
        assert codes == [0] * len(nodes), errors
        assert "restarted" not in errors
        if "elastic" not in case.strategies:
            assert weights("".join(one.out.read_text() for one in nodes)) == expected != set()
