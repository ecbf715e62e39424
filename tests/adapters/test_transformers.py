"""The Trainer of taskd.integrations.transformers: the same in every bit, whatever fails where."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

PYTHON = ROOT / ".venvs/adapters/bin/python"
TIMED = ("runtime", "per_second", "preparation_time")
TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")
LIMIT_S = 900
"""For one job, on a busy machine: its processes import much, and are replaced often."""


def run(
    folder: Path,
    faults: str = "",
    env: dict[str, str] | None = None,
    ranks: int = 2,
    code: int = 0,
) -> dict[str, Any]:
    """What the job has left in its folder: results of all ranks, and its checkpoints."""
    folder.mkdir(exist_ok=True)
    command = [PYTHON, "-m", "taskd", "run", f"--nproc-per-node={ranks}"]
    command += (env or {}).get("OPTIONS", "").split()
    preload, script = "--preload=taskd.integrations.transformers", "resilient_trainer.py"
    done = subprocess.run(
        [*map(str, command), preload, ROOT / "tests/adapters" / script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FAULTS": faults, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    left: dict[str, Any] = {
        path.name: json.loads(path.read_text()) for path in folder.glob("end-*.json")
    }
    times = {path.read_text() for path in folder.glob("times-*.json")}
    assert len(times) < 2, f"the logs of the ranks differ by the times of evaluations: {times}"
    left["weights"] = sorted(
        line.split("weights ")[1] for line in done.stdout.splitlines() if "weights " in line
    )
    for path in sorted(folder.glob("saved/*/**/*")):
        if path.name == "trainer_state.json":
            left[str(path.relative_to(folder))] = without_times(json.loads(path.read_text()))
        elif path.suffix in TENSORS:
            left[str(path.relative_to(folder))] = path.read_bytes()
    left["events"] = [event_lines(folder / f"events-{rank}") for rank in range(ranks)]
    left["launcher"] = done.stderr
    return left


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    history = [
        {name: value for name, value in entry.items() if not name.endswith(TIMED)}
        for entry in state["log_history"]
    ]
    return {**state, "log_history": history}


def event_lines(path: Path) -> list[str]:
    """What the callbacks saw. A replacement repeats the code after the step of its predecessor."""
    return list(dict.fromkeys(path.read_text().splitlines()))


INCIDENTS = re.compile(r"^taskd: {3}incident (?:(\d+) to )?(\d+): (.*)", re.MULTILINE)
"""The first one, if a line tells of several; the last one; what became of them."""


def assert_same(calm: dict[str, Any], disturbed: dict[str, Any], faults: int) -> None:
    """Each fault was an incident, and all were repaired without a restart.

    Two faults of one step may be told in one line: on a busy machine the second one comes before a
    step has shown that the first one is repaired. A repair that needs two tries is one line, too.
    """
    launcher = disturbed["launcher"]
    told = INCIDENTS.findall(launcher)
    assert all("recovered in" in became for _, _, became in told), launcher
    incidents = sum(int(last) - int(first or last) + 1 for first, last, _ in told)
    assert len(told) <= faults <= incidents, launcher
    assert_equal(calm, disturbed)


def assert_equal(calm: dict[str, Any], disturbed: dict[str, Any]) -> None:
    launcher = disturbed.pop("launcher")
    assert disturbed.keys() == calm.keys() - {"launcher"}, launcher
    for name, expected in calm.items():
        if name != "launcher":
            assert disturbed[name] == expected, f"{name}\n{launcher}"


DDP: dict[str, str] = {}
FSDP2 = {"FSDP": json.dumps({"version": 2})}
IN_PIECES = {"FSDP": json.dumps({"version": 2, "state_dict_type": "SHARDED_STATE_DICT"})}
"""FSDP2 whose checkpoints are written by all ranks."""
WITHOUT_ACTIVATIONS = {
    "FSDP": json.dumps(
        {
            "version": 2,
            "activation_checkpointing": True,
            "reshard_after_forward": False,
            "cpu_ram_efficient_loading": True,
        }
    )
}
either = pytest.mark.parametrize("sharding", [DDP, FSDP2], ids=["DDP", "FSDP2"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], dict[str, Any]]:
    """What an undisturbed run with this sharding has left. It runs once."""
    known: dict[str, dict[str, Any]] = {}

    def left(sharding: dict[str, str]) -> dict[str, Any]:
        name = sharding.get("FSDP", "")
        if name not in known:
            known[name] = run(tmp_path_factory.mktemp("calm") / "run", env=sharding)
        return dict(known[name])

    return left


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("sharding", [DDP, FSDP2, IN_PIECES], ids=["DDP", "FSDP2", "in pieces"])
@pytest.mark.parametrize(
    "faults",
    [
        "1.0.optimizer 1.2.forward 0.4.prediction 1.7.optimizer 0.9.substep ~1.11.backward "
        "0.13.scheduler",
        "0.1.step 0.3.log 1.4.evaluate 0.8.saving 1.10.epoch 0.12.save 1.15.log",
    ],
    ids=["in steps", "between steps"],
)
def test_trainer_loses_no_step(
    faults: str, sharding: dict[str, str], calm: Any, tmp_path: Path
) -> None:
    expected = calm(sharding)
    # accelerate alone would train with DDP on the CPU, without a word.
    assert len(set(expected["weights"])) == (2 if sharding else 1)
    disturbed = run(tmp_path / "run", faults, sharding)
    assert_same(expected, disturbed, len(faults.split()))


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("sharding", [DDP, WITHOUT_ACTIVATIONS], ids=["DDP", "FSDP2"])
def test_early_stopping_with_workers_and_bf16_is_exact(
    sharding: dict[str, str], tmp_path: Path
) -> None:
    env = {"STOP_EARLY": "0.0", "WORKERS": "1", "BF16": "1", "EVAL_ON_START": "1", **sharding}
    calm = run(tmp_path / "calm", env=env)
    disturbed = run(tmp_path / "run", "1.0.optimizer 0.3.forward 1.8.evaluate", env)
    assert_same(calm, disturbed, 3)


@pytest.mark.timeout(2 * LIMIT_S)
def test_seq2seq_trainer_with_generation_is_exact(tmp_path: Path) -> None:
    """It is evaluated before its training as well, after which accelerate alone forgets DDP."""
    env = {"SEQ2SEQ": "1"}
    calm = run(tmp_path / "calm", env=env)
    assert len(set(calm["weights"])) == 1, "the ranks have trained apart"
    disturbed = run(tmp_path / "run", "1.2.forward 0.4.prediction 1.6.scheduler 0.9.backward", env)
    assert_same(calm, disturbed, 4)


@pytest.mark.timeout(2 * LIMIT_S)
@either
def test_sft_trainer_of_trl_is_exact(sharding: dict[str, str], tmp_path: Path) -> None:
    env = {"SFT": "1", **sharding}
    calm = run(tmp_path / "calm", env=env)
    faults = "1.2.forward 0.3.log 1.4.prediction 0.8.saving 1.9.optimizer 0.12.evaluate"
    disturbed = run(tmp_path / "run", faults, env)
    assert_same(calm, disturbed, len(faults.split()))


@pytest.mark.timeout(2 * LIMIT_S)
@either
def test_two_of_three_ranks_are_lost_at_once_with_fp16(
    sharding: dict[str, str], tmp_path: Path
) -> None:
    env = {"FP16": "1", **sharding}
    calm = run(tmp_path / "calm", env=env, ranks=3)
    faults = "0.3.forward 1.3.forward 1.6.log 2.6.log"
    disturbed = run(tmp_path / "run", faults, env, ranks=3)
    assert "restart" not in disturbed["launcher"], disturbed["launcher"]
    assert_equal(calm, disturbed)


@pytest.mark.timeout(2 * LIMIT_S)
@either
def test_everything_is_killed(sharding: dict[str, str], calm: Any, tmp_path: Path) -> None:
    """The next start resumes from a continuous checkpoint, newer than that of the Trainer.

    A rank that is lost after that is replaced by one that loads no checkpoint.
    """
    env, folder = {"OPTIONS": "--checkpoint-every=9", **sharding}, tmp_path / "run"
    waits = {"AWAIT": "10", "TASKD_QUIET_FLOOR_S": "90"}
    run(folder, "!1.11.forward", {**env, **waits}, code=-9)
    assert (folder / "saved/checkpoint-8").exists()
    resumed = run(folder, "0.9.optimizer 1.13.forward", env)
    assert "resuming at step 9" in resumed["launcher"], resumed["launcher"]
    assert_equal(calm(sharding), resumed)


@pytest.mark.timeout(2 * LIMIT_S)
def test_callback_that_raises_ends_the_job_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the callback has failed"):
        run(tmp_path / "run", env={"RAISE_AT": "3"})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"version": 1, "sync_module_states": False}, "interrupted in FSDP1 cannot be undone"),
        ({"version": 2, "cpu_offload": True}, "cpu_offload was never tried"),
    ],
    ids=["FSDP1", "offload"],
)
def test_fsdp_that_cannot_be_repeated_is_refused(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=reason):
        run(tmp_path / "run", env={"FSDP": json.dumps(config)})
