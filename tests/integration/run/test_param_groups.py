"""An optimizer that gets new parameters while it trains."""

from __future__ import annotations

from pathlib import Path

from tests.integration.run.run_job import run, script

TRAIN = """
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net[1].parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(5):
        if step == 2:
            optimizer.add_param_group({"params": list(net[0].parameters())})
        for attempt in step:
            with attempt:
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
"""


def test_new_group_of_parameters_is_named_once(tmp_path: Path) -> None:
    """A replacement has not run the code that has created it."""
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN))
    assert ended.code == 0, ended.err
    text = ended.out + ended.err
    assert text.count("has got other groups of parameters in step 2") == 2, "once in each rank"
