"""A rank on a real device, or its connections, are lost; the result is identical in every bit.

All ranks share one device, over gloo or over NCCL.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration.run import run_job

TRAIN = str(Path(__file__).parent / "train.py")
STEPS = 60


def run(kind: str, backend: str, fault: str, **env: str) -> run_job.Ended:
    ranks = "4" if backend == "gloo" else "2"
    with TemporaryDirectory() as folder:
        command = ("--nproc-per-node", ranks, TRAIN, kind, backend, str(STEPS))
        return run_job.run(Path(folder), *command, FAULT=fault, **env)


def weights(ended: run_job.Ended) -> str:
    assert ended.code == 0, ended.out + ended.err
    found = re.search(r"weights (\w+)", ended.out)
    assert found is not None, ended.out + ended.err
    return found[1]


@cache
def calm(kind: str, backend: str) -> str:
    return weights(run(kind, backend, "-1 -1 none"))


@pytest.mark.parametrize(
    ("kind", "backend", "fault", "strategy"),
    [
        ("ddp", "gloo", "1 20 killed", "recover-in-place"),
        ("ddp", "nccl", "1 20 killed", "recover-in-place"),
        ("ddp", "nccl", "0 20 killed", "recover-in-place"),
        ("ddp", "nccl", "1 20 cut off", "retry"),
        ("reading", "nccl", "1 20 killed", "recover-in-place"),
        ("reading", "nccl", "0 20 cut off", "retry"),
        ("subgroups", "nccl", "1 20 killed", "recover-in-place"),
        ("split", "nccl", "1 20 killed", "recover-in-place"),
        ("mesh", "nccl", "0 20 killed", "recover-in-place"),
        ("exchange", "nccl", "1 20 killed", "recover-in-place"),
        ("exchange", "nccl", "0 20 cut off", "retry"),
        ("exchange", "nccl", "1 20 raises", "retry"),
        ("fsdp", "nccl", "1 20 killed", "recover-in-place"),
        ("fsdp", "nccl", "0 20 cut off", "retry"),
    ],
)
def test_weights_are_identical_after_a_fault(
    kind: str, backend: str, fault: str, strategy: str
) -> None:
    ended = run(kind, backend, fault)
    sys.stdout.write(f"{kind} {backend} {fault}\n{ended.err}\n")
    assert weights(ended) == calm(kind, backend)
    assert f"{strategy}: recovered" in ended.err
