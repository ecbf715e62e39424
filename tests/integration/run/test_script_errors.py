"""How a script ends decides what happens: errors that would repeat, and aborts after the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from taskd.errors import DO_NOT_REPLACE
from tests.integration.run.run_job import Ended, Job, run, script

COUNTED = """
    import os
    from pathlib import Path

    rank = int(os.environ["RANK"])
    with Path(f"starts-{rank}").open("a") as file:
        file.write("x")
    starts = Path(f"starts-{rank}").stat().st_size
"""
PROTECTED = """
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)

    def train(do_first=lambda step: None):
        for step in job.steps(12):
            with step:
                do_first(int(step))
                model(torch.ones(8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
"""


def starts(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("starts-*"))]


def run_counted(folder: Path, text: str, *words: str) -> Ended:
    return run(folder, "--nproc-per-node=2", *words, script(folder, COUNTED + text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("    import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("    exec('a b')", "SyntaxError: "),
    ],
)
def test_error_in_the_source_is_not_repeated(tmp_path: Path, text: str, says: str) -> None:
    ended = run_counted(tmp_path, text)
    assert ended.code == DO_NOT_REPLACE
    assert starts(tmp_path) == [1, 1]
    failed = next(line for line in ended.err.splitlines() if "failed after" in line)
    assert says in failed, ended.err


def test_error_at_start_is_repeated_at_most_once(tmp_path: Path) -> None:
    ended = run_counted(tmp_path, "    raise ValueError('wrong learning rate')")
    assert ended.code == DO_NOT_REPLACE
    assert max(starts(tmp_path)) <= 2
    failed = next(line for line in ended.err.splitlines() if "failed after" in line)
    assert "ValueError: wrong learning rate" in failed, ended.err
    assert "train.py:9" in failed, ended.err


def test_same_error_in_a_step_twice_ends_the_job(tmp_path: Path) -> None:
    text = f"""{PROTECTED}
    def fail(step):
        if step == 5 and rank == 1:
            raise ValueError(f"bad batch, start {{starts}}")

    train(fail)
    """
    ended = run_counted(tmp_path, text, f"--dump-dir={tmp_path / 'dump'}")
    assert ended.code == DO_NOT_REPLACE
    # The peer may report a lost connection long before the end of the second process is known, and
    # be given a third one. Its error decides nothing.
    assert starts(tmp_path) in ([1, 2], [1, 3]), ended.err
    failed = next(line for line in ended.err.splitlines() if "failed after" in line)
    assert "rank 1 failed with the same error twice" in failed, ended.err
    assert list((tmp_path / "dump").glob("step-5/taskd.json")), "the survivor has its state"


def test_error_of_all_ranks_after_steps_is_tried_again(tmp_path: Path) -> None:
    text = f"""{PROTECTED}
    def fail(step):
        if step == 5 and starts == 1:
            raise ValueError("the file system was away for a moment")

    train(fail)
    """
    ended = run_counted(tmp_path, text)
    assert ended.code == 0, ended.err
    assert starts(tmp_path) == [2, 2]


def test_different_errors_do_not_end_the_job(tmp_path: Path) -> None:
    text = """
    if starts == 1:
        raise OSError("no data")
    if starts == 2:
        raise OSError("no data")
    """
    ended = run(tmp_path, script(tmp_path, COUNTED + text))
    assert ended.code == 0, ended.err
    assert starts(tmp_path) == [3]


def test_no_restart_when_none_is_allowed(tmp_path: Path) -> None:
    text = "    os.kill(os.getpid(), 9) if rank else None"
    ended = run_counted(tmp_path, text, "--max-restarts=0")
    assert ended.code == 1
    assert starts(tmp_path)[1] == 1


def test_abort_in_the_interpreters_shutdown_does_not_undo_the_job(tmp_path: Path) -> None:
    text = f"""{PROTECTED}
    class Bomb:
        def __del__(self, abort=os.abort):
            abort()

    train()
    print("trained", job.step, flush=True)
    bomb = Bomb() if rank == 1 else None
    """
    ended = run_counted(tmp_path, text)
    assert ended.code == 0, ended.err
    assert starts(tmp_path) == [1, 1]
    assert ended.out.count("trained 12") == 2
    late = (
        "rank 1: killed by signal 6, SIGABRT after its script had ended, which counts as finished"
    )
    assert late in ended.err
    assert "0 faults" in ended.err


def test_summary_after_ctrl_c_names_no_rank_that_was_repaired(tmp_path: Path) -> None:
    text = f"""{PROTECTED}
    import signal, threading

    def die(step):
        if step == 3 and rank == 1 and starts == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 11:
            print("last step", flush=True)
            threading.Event().wait()

    train(die)
    """
    job = Job(tmp_path, "--nproc-per-node=2", script(tmp_path, COUNTED + text))
    job.wait_for("last step")
    job.signal(signal.SIGINT)
    ended = job.end()
    assert ended.code == 1
    assert "1 fault: stopped by SIGINT" in ended.err, ended.err
    assert "first rank to fail" not in ended.err, ended.err
