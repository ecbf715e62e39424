"""How nodes draw their ranks, with torch's own store and real claims."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import HashStore

from taskd.agent.run.node_ranks import Claim, claim, machine_id
from taskd.agent.run.node_ranks import draw as draw_rank
from taskd.agent.run.rendezvous import is_local_address, wildcard_address

_jobs = count()


Draw = Callable[[HashStore, str, int, str], tuple[int, Claim]]


@pytest.fixture
def job() -> str:
    return f"ranks-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def draw() -> Iterator[Draw]:
    """Claims are held until the test ends."""
    held = []

    def draw_once(store: HashStore, job: str, first: int, here: str) -> tuple[int, Claim]:
        drawn = draw_rank(store, job, first, here)
        held.append(drawn[1])
        return drawn

    yield draw_once
    for each in held:
        each.close()


def test_ranks_are_given_out_in_order(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = [draw(store, job, 1, f"machine{n}") for n in range(3)]
    assert [node for node, _ in drawn] == [1, 2, 3]
    spare, _ = draw(store, job, 4, "machine4")
    assert spare == 4


def test_two_launchers_on_one_machine_are_two_nodes(job: str, draw: Draw) -> None:
    store, here = HashStore(), machine_id("")
    drawn = [draw(store, job, 1, here) for _ in range(2)]
    assert [node for node, _ in drawn] == [1, 2]


def test_rank_of_dead_launcher_stays_with_its_machine(job: str, draw: Draw) -> None:
    store = HashStore()
    drawn = {name: draw(store, job, 1, name) for name in ("a", "b")}
    for _, held in drawn.values():
        held.close()  # both have died
    node, _ = draw(store, job, 1, "c")
    assert node == 3, "only the machine itself knows that they are dead"
    assert [draw(store, job, 1, name)[0] for name in ("b", "a")] == [2, 1]


def test_rank_claimed_on_this_machine_is_not_drawn(job: str, draw: Draw) -> None:
    claimed = claim(job, 1)
    assert claimed is not None
    assert claim(job, 1) is None
    assert draw(HashStore(), job, 1, machine_id(""))[0] == 2
    claimed.close()


def test_machine_id_depends_on_given_name() -> None:
    assert machine_id("") == machine_id("") != machine_id("another")


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("127.0.0.9", True), ("192.0.2.1", False), ("no.such.invalid", False)],
)
def test_local_address_is_recognized(host: str, own: bool) -> None:
    assert is_local_address(host) is own


def test_wildcard_address_has_family_of_host() -> None:
    assert wildcard_address("::1") == "::"
    assert wildcard_address("127.0.0.1") == wildcard_address("no.such.invalid") == "0.0.0.0"


OTHER_USER = 65534
SQUATTER = """
import os, socket, sys
from hashlib import blake2b
os.setuid(int(sys.argv[1]))
job, folder, taken = sys.argv[2], sys.argv[3], []
for uid in (0, int(sys.argv[4])):
    name = blake2b(f"{uid}/{job}/1".encode(), digest_size=16).hexdigest()
    taken.append(socket.socket(socket.AF_UNIX))
    taken[-1].bind(chr(0) + "taskd/" + name)
try:
    os.listdir(folder)
except PermissionError:
    print("squatting", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_take_a_claim(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a claim was an abstract socket, whose name any user could guess or look up."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = claim(job, 1)
    assert first is not None
    first.close()
    words = [str(OTHER_USER), job, str(tmp_path / "taskd"), str(os.getuid() or 1)]
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "squatting\n"
        held = claim(job, 1)
        assert held is not None
        held.close()
        squatter.communicate()
    assert not list((tmp_path / "taskd").glob("*.claim")), "claims leave no files"


def test_claim_ends_with_its_process(job: str) -> None:
    code = (
        "import sys; from taskd.agent.run.node_ranks import claim; held = claim(sys.argv[1], 1);"
        "print(held is not None, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert claim(job, 1) is None
        holder.kill()
    held = claim(job, 1)
    assert held is not None
    held.close()
