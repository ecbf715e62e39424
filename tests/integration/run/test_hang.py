"""A rank that hangs with `taskd run` is reported with evidence and replaced; nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.run.run_job import run, script

PROTECTED = """
    import os, signal, sys, threading
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    seen = 0
    for step in job.steps(60):
        with step:
            model(torch.randn(4, 8) + job.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.02)
            seen += 1
            if job.rank == 1 and os.environ["TASKD_INCARNATION"] == "0" and seen == 25:
                exec(sys.argv[1])
    print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""

HANGS = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "deadlocked": "threading.Event().wait()",
    "spinning": "while True: pass",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed after the store": (
        "import psutil; [one.kill() for one in psutil.Process().parent().children() "
        "if one.name() == 'taskd:store'] or exit('no store'); os.kill(os.getpid(), signal.SIGKILL)"
    ),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The weights of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder, "--nproc-per-node=2", script(folder, PROTECTED), "pass")
    assert ended.code == 0, ended.err
    return sorted(ended.out.splitlines())


@pytest.mark.parametrize("how", HANGS)
def test_hung_or_killed_rank_is_replaced_and_weights_are_same(
    tmp_path: Path, how: str, weights: list[str]
) -> None:
    path, state = script(tmp_path, PROTECTED), tmp_path / "state"
    ended = run(tmp_path, "--nproc-per-node=2", f"--state-dir={state}", path, HANGS[how])
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == weights
    incident = json.loads((state / "summary.json").read_text())["incidents"][-1]
    assert [fault["rank"] for fault in incident["faults"]] == [1]
    if "killed" not in how:
        assert incident["faults"][0]["kind"] == "hung"
        assert "rank 1 has made no progress" in incident["faults"][0]["evidence"]
    if how in ("deadlocked", "spinning"):
        assert "in <module>" in incident["faults"][0]["evidence"], "its stack is missing"


def test_survivors_dump_to_given_folder_and_next_start_resumes_there(
    tmp_path: Path, weights: list[str]
) -> None:
    path, folder = script(tmp_path, PROTECTED), tmp_path / "kept"
    words = ["--nproc-per-node=2", "--strategies=dump", f"--dump-dir={folder}", path]
    ended = run(tmp_path, *words, HANGS["killed"])
    assert ended.code == 1, ended.err
    assert list(folder.glob("step-*/taskd.json")), ended.err
    resumed = run(tmp_path, *words, "pass")
    assert resumed.code == 0, resumed.err
    assert sorted(resumed.out.splitlines()) == weights


SLOW = """
    import os, sys, threading, time
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    big = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))

    def long_step():
        big(torch.randn(512, 512)).square().mean().backward()

    def evaluate():
        with torch.no_grad():
            big.eval()(torch.randn(256, 512)).argmax(dim=1).float().mean().item()

    def save():
        torch.save(big.state_dict(), f"checkpoint.{job.rank}")

    def for_a_while(work):
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            work()

    alone = job.rank == 1
    for step in job.steps(60):
        with step:
            if alone and step == 25:
                for_a_while(long_step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.02)
        if alone and step == 35:
            for_a_while(evaluate)
        if alone and step == 45:
            for_a_while(save)
"""


def test_slow_rank_that_still_works_is_not_replaced(tmp_path: Path) -> None:
    """Each pause is several times as long as the time after which a rank counts as hung."""
    state = tmp_path / "state"
    ended = run(tmp_path, "--nproc-per-node=2", f"--state-dir={state}", script(tmp_path, SLOW))
    assert ended.code == 0, ended.err
    assert json.loads((state / "summary.json").read_text())["incidents"] == []


STOPPED = """
    import os, signal, sys
    import torch
    import taskd.torch as taskd

    def stop(where):
        first = os.environ["TASKD_INCARNATION"] == "0"
        if where == sys.argv[1] and os.environ["RANK"] == "1" and first:
            os.kill(os.getpid(), signal.SIGSTOP)

    stop("before init")
    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    stop("before the first step")
    for step in job.steps(8):
        with step:
            if step == 1:
                stop("in a step without collectives")
            if step % 4 == 3:
                model(torch.randn(4, 8) + job.rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    stop("after the last step")
    print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""


@pytest.mark.parametrize(
    "where",
    [
        "before init",
        "before the first step",
        "in a step without collectives",
        "after the last step",
    ],
)
def test_stopped_process_is_hung_wherever_its_rank_is(tmp_path: Path, where: str) -> None:
    """No pace is known yet, or no other rank waits for it in a collective."""
    path, state = script(tmp_path, STOPPED), tmp_path / "state"
    expected = run(tmp_path, "--nproc-per-node=2", path, "nowhere")
    ended = run(tmp_path, "--nproc-per-node=2", f"--state-dir={state}", path, where)
    assert ended.code == 0, ended.err
    assert set(ended.out.splitlines()) == set(expected.out.splitlines())
    incidents = json.loads((state / "summary.json").read_text())["incidents"]
    fault = incidents[0]["faults"][0]
    assert (fault["rank"], fault["kind"]) == (1, "hung")
    assert "a signal stopped its process" in fault["evidence"]
