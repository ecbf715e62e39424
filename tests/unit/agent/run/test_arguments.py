"""`taskd run` accepts torchrun's command line: our table is compared with torch's own parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from taskd.agent.run import plan
from taskd.agent.run.arguments import add_arguments
from taskd.errors import SettingsError

DIFFERENT = {"start_method", "max_restarts", "master_port"}
"""Ours forks by default and does not limit restarts. The port's default depends on torch."""


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_TOKEN", "secret")


LEFT_OUT = {"print_completion"}
"""Prints completions of the command `torchrun` for a shell, and starts nothing."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made


def options(of: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in of._actions if action.option_strings}


def test_every_torchrun_option_exists_with_same_default() -> None:
    theirs, ours = options(get_args_parser()), options(parser())
    for name, action in theirs.items():
        if name in LEFT_OUT:
            continue
        assert name in ours, f"torchrun has a new option: {name}"
        assert set(action.option_strings) <= set(ours[name].option_strings)
        if name not in DIFFERENT:
            assert action.default == ours[name].default, name


def test_own_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests set them where they cannot change the command."""
    monkeypatch.setenv("PET_CLUSTERD", "clusterd:8899")
    monkeypatch.setenv("PET_ETCD", "etcd:2379")
    found = parser().parse_args(["train.py"])
    assert (found.clusterd, found.etcd) == ("clusterd:8899", "etcd:2379")
    assert parser().parse_args(["--clusterd=other:1", "train.py"]).clusterd == "other:1"


def test_environment_is_read_as_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_STANDALONE", "1")
    words = ["train.py", "--nproc-per-node", "9"]
    args, theirs = parser().parse_args(words), get_args_parser().parse_args(words)
    assert (args.nproc_per_node, args.standalone) == ("3", True)
    assert (theirs.nproc_per_node, theirs.standalone) == ("3", True)
    assert args.training_script_args == theirs.training_script_args == words[1:]


def read(tmp_path: Path, *words: str) -> plan.Plan:
    script = tmp_path / "train.py"
    script.touch()
    return plan.read(parser().parse_args([*words, str(script), "--lr", "1"]))


def test_plain_command(tmp_path: Path) -> None:
    made = read(tmp_path, "--nproc-per-node=4")
    assert (made.nodes, made.local_size, made.world_size, list(made.ranks)) == (
        1,
        4,
        4,
        [0, 1, 2, 3],
    )
    assert made.max_restarts == 32767
    assert made.program.arguments == ("--lr", "1")
    assert made.token
    assert not made.spawn


def test_second_of_two_nodes(tmp_path: Path) -> None:
    words = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--rdzv-endpoint=head:29400"]
    made = read(tmp_path, *words, "--rdzv-id=j")
    assert (made.master_addr, made.master_port, made.manager_port) == ("head", 29400, 9601)
    assert (list(made.ranks), made.world_size, made.job) == ([2, 3], 4, "j")


def test_several_nodes_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one any process that reaches the store could run code in the ranks."""
    monkeypatch.delenv("TASKD_TOKEN")
    with pytest.raises(SettingsError, match="set TASKD_TOKEN to the same value on all nodes"):
        read(tmp_path, "--nnodes=2")
    assert read(tmp_path, "--nnodes=2", "--insecure").token == ""
    assert read(tmp_path).token != read(tmp_path).token != ""


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    words = ["--nnodes=none", "--nproc-per-node=-1", "--strategies=x,retry", "--tee=9"]
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, *words, "--clusterd=nowhere")
    assert len(raised.value.problems) == 5


def test_etcd_needs_addresses_and_several_nodes(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, "--etcd=one,two:0,three:2379")
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "--etcd must be HOST",
        "--etcd must be HOST",
        "--etcd needs --nnodes of 2 or more",
    ]
    assert read(tmp_path, "--nnodes=2", "--etcd=a:1,b:2").etcd == "a:1,b:2"


def test_streams_can_be_chosen_per_rank(tmp_path: Path) -> None:
    made = read(tmp_path, "--nproc-per-node=2", "--redirects=0:1,1:2", "--tee=3")
    assert made.logs.redirects == {0: 1, 1: 2}
    assert made.logs.tee == {0: 3, 1: 3}


def test_c10d_nodes_need_no_rank(tmp_path: Path) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head:29401"]
    made = read(tmp_path, *words, "--rdzv-conf=join_timeout=70,last_call_timeout=3,is_host=0")
    assert (made.draws_rank, made.is_first_node, made.join_timeout_s) == (True, False, 70.0)
    assert (made.master_addr, made.master_port) == ("head", 29401)
    assert list(made.with_node(1).ranks) == [1]
    assert made.with_node(2).spare
    given = read(tmp_path, *words, "--node-rank=0")
    assert (given.draws_rank, given.node) == (False, 0)


def test_node_rank_can_come_from_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    made = read(tmp_path, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head")
    assert (made.draws_rank, made.node) == (False, 1)


@pytest.mark.parametrize(("backend", "port"), [("static", 29500), ("c10d", 29400)])
def test_default_ports_are_torchruns(tmp_path: Path, backend: str, port: int) -> None:
    words = ["--nnodes=2", "--node-rank=1", f"--rdzv-backend={backend}"]
    assert read(tmp_path, *words).master_port == port
    assert read(tmp_path, f"--rdzv-backend={backend}").master_port is None


def test_join_timeout_overrides_rdzv_conf(tmp_path: Path) -> None:
    conf = "--rdzv-conf=timeout=70"
    assert read(tmp_path).join_timeout_s == 900.0
    assert read(tmp_path, conf).join_timeout_s == 70.0
    assert read(tmp_path, conf, "--join-timeout=5").join_timeout_s == 5.0


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("--rdzv-backend=etcd-v2", "--rdzv-backend etcd-v2 is not supported"),
        ("--rdzv-backend=mine", "--rdzv-backend mine is not supported"),
        ("--rdzv-conf=timeout", "KEY=VALUE"),
        ("--rdzv-conf=timeout=soon", "timeout must be a number of seconds"),
        ("--rdzv-conf=is_host=perhaps", "is_host must be true or false"),
    ],
)
def test_unsupported_rendezvous_is_refused(tmp_path: Path, word: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        read(tmp_path, word)


@pytest.mark.parametrize(
    ("method", "spawn"), [("fork", False), ("spawn", True), ("forkserver", True)]
)
def test_only_start_method_fork_forks(tmp_path: Path, method: str, spawn: bool) -> None:
    assert read(tmp_path, f"--start-method={method}").spawn is spawn
