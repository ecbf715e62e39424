"""A replacement receives a large state from several ranks at once, one share from each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from taskd.torch.state import pieces, state_link
from taskd.torch.state.state_link import StateRequest
from taskd.torch.state.transfer import Piece, StateImage, split
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run

STEPS = 6
RECEIVER = 2


def from_several(args: dict[str, Any]) -> None:
    """Every state counts as large, and each rank writes down what it has requested and sent."""
    pieces.MULTI_SENDER_BYTES = 1
    os.environ["TASKD_ENCRYPT_STATE"] = "on" if args.get("encrypted") else "off"
    fetch, serve = state_link.fetch, state_link.serve
    log = Path(args["folder"]) / f"fetched-{args['rank']}"
    send, sent = StateImage.send, Path(args["folder"]) / f"sent-{args['rank']}"

    def logged(
        rendezvous: Any, source: int, request: StateRequest, read: Any, local: Any = None
    ) -> None:
        fetch(rendezvous, source, request, read, local)
        with log.open("a") as file:
            way = "TCP" if local is None else "locally"
            file.write(f"{source} {request.share} of {request.senders} {way}\n")

    def sending(image: StateImage, out: Any, senders: int, share: int, *, bare: bool) -> None:
        with sent.open("a") as file:
            what = "bare" if bare else "with digests"
            file.write(f"{share} {what}{', sealed' * bool(image._sealed)}\n")
        send(image, out, senders, share, bare=bare)

    def dying(*arguments: Any) -> None:
        if (args["rank"], args["incarnation"]) == tuple(args["dies_sending"]):
            os.kill(os.getpid(), signal.SIGKILL)
        serve(*arguments)

    setattr(StateImage, "send", sending)  # noqa: B010
    setattr(state_link, "fetch", logged)  # noqa: B010 - for the lifetime of this process
    if args.get("dies_sending"):
        setattr(state_link, "serve", dying)  # noqa: B010
    scripts.ddp(args)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.ddp, steps=STEPS))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_replacement_receives_from_all_survivors(
    calm: list[Any], tmp_path: Path, encrypted: bool, nodes: int
) -> None:
    """Digests prove that all of them hold the same, also on one machine."""
    kills = [(RECEIVER, 0, 3, "in backward")]
    world = run(
        tmp_path / "run",
        from_several,
        steps=STEPS,
        kills=kills,
        encrypted=encrypted,
        ranks_per_node=4 // nodes,
    )
    fetched = sorted((world.folder / "fetched-2").read_text().splitlines())
    order = [0, 1, 3] if nodes == 1 else [3, 0, 1]
    ways = ["locally", "TCP", "TCP"]  # the first one is on the node of the receiver
    assert fetched == sorted(
        f"{one} {at} of 3 {way}" for at, (one, way) in enumerate(zip(order, ways, strict=True))
    )
    sent = (world.folder / f"sent-{order[0]}").read_text()
    assert sent == "0 with digests, sealed\n"
    assert_same(calm, world)


def test_sender_dies_before_it_has_sent_its_share(calm: list[Any], tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward")]
    world = run(tmp_path / "run", from_several, steps=STEPS, kills=kills, dies_sending=(3, 0))
    assert world.incarnations[3] == 1
    assert world.incident >= 2
    assert_same(calm, world)


def described(*sizes: int) -> list[Piece]:
    return [
        Piece(("parameter", at, ""), (size,), torch.uint8, sharded=False, on_host=True)
        for at, size in enumerate(sizes)
    ]


def test_shares_are_about_equal_and_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MULTI_SENDER_BYTES", 100)
    assert split(described(10, 10, 10), 3) == [range(3)], "too small to be split"
    assert split(described(100, 100), 1) == [range(2)]
    assert split(described(*[10] * 30), 3) == [range(10), range(10, 20), range(20, 30)]
    for sizes in ([500, 1, 1, 1], [1, 1, 1, 500], [0, 200, 0, 0], [200]):
        shares = split(described(*sizes), 4)
        assert [index for share in shares for index in share] == list(range(len(sizes)))
        assert len(shares) == 4
