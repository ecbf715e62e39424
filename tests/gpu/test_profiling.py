"""Device times in a recording. Needs CUDA; one rank, over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TRAIN = """
    import time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import taskd.torch
    from taskd.model.profiling import EVERYTHING, NOTHING
    from taskd.worker.profiling import profiler

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:0",
                            device_id=torch.device("cuda:0"))
    model = DistributedDataParallel(torch.nn.Sequential(
        *(torch.nn.Linear(4096, 4096, device="cuda") for _ in range(8))), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2048, 4096, device="cuda")
    ours = profiler.of_process()

    def train(steps):
        begin = time.perf_counter()
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        return host / steps, (time.perf_counter() - begin) / steps

    train(10)
    off, on = [], []
    for turn in range(6):
        off.append(train(40))
        ours.request(EVERYTHING)
        train(2)
        on.append(train(40))
        if turn < 5:
            ours.request(NOTHING)
            train(2)
    middle = lambda values: sorted(values)[len(values) // 2]
    torch.cuda.synchronize()
    ours.save()
    pace = ours.pace()
    print("RESULT", __import__("json").dumps({
        "off_ms": [middle([o[k] for o in off]) * 1e3 for k in (0, 1)],
        "on_ms": [middle([o[k] for o in on]) * 1e3 for k in (0, 1)],
        "steps": pace.steps, "total_s": pace.total_s, "wait_s": pace.wait_s,
        "collectives": pace.collectives, "problem": pace.problem}))
"""


def test_collectives_and_steps_have_device_times(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN).replace("tcp://127.0.0.1:0", "tcp://127.0.0.1:29533"))
    source = str(ROOT / "src")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={
            **os.environ,
            "TASKD_PROFILING_DIR": str(tmp_path / "p"),
            "MINDX_TASK_ID": "gpu",
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.split("RESULT ")[1])
    sys.stdout.write(json.dumps(result) + "\n")
    assert not result["problem"]
    lines = [
        json.loads(line)
        for file in (tmp_path / "p/gpu/0").iterdir()
        for line in file.read_text().splitlines()
    ]
    device = [line for line in lines if line["SourceKind"] == 1]
    steps = [line for line in device if line["Name"].startswith("step")]
    collectives = [line for line in device if line["Domain"] == "communication"]
    assert len(steps) > 40
    assert len(collectives) > 40
    # The step on the device is as long as the whole step; the host runs ahead and does not see it.
    mean_ms = result["total_s"] / result["steps"] * 1e3
    assert 0.7 < mean_ms / result["on_ms"][1] < 1.4
    begun = {line["Id"]: line["Timestamp"] for line in device if line["Flag"] == 16}
    ended = {line["Id"]: line["Timestamp"] for line in device if line["Flag"] == 32}
    assert all(0 <= ended[key] - begun[key] < 10**9 for key in ended)
