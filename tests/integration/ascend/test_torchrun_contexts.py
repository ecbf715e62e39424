"""torch's own agent, with workers that are started, stopped and replaced one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from taskd.python.adaptor.patch import torch_patch
from taskd.python.framework.agent.pt_agent.pt_agent import get_fault_workers, get_pids
from taskd.runtime.address import free_port

# Torch does not close the log files of a worker that has died.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAM = 'echo "$RANK $LOCAL_RANK $RESTART_FAULT_PROCESS_TYPE"; exec sleep 1000'


class Agent(LocalElasticAgent):
    _start_workers = torch_patch.patch_start_workers
    _stop_workers = torch_patch.patch_stop_workers
    _restart_workers = torch_patch.patch_restart_workers
    _monitor_workers = torch_patch.patch_monitor_workers


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    created = []

    def make_agent(program: str) -> Any:
        endpoint = f"127.0.0.1:{free_port()}"
        spec = WorkerSpec(
            role="default",
            local_world_size=2,
            entrypoint="/bin/sh",
            args=("-c", program),
            rdzv_handler=get_rendezvous_handler(
                RendezvousParameters("static", endpoint, "run", 1, 1, rank=0)
            ),
            max_restarts=3,
            master_addr="127.0.0.1",
            master_port=free_port(),
        )
        logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.OUT)
        agent: Any = Agent(spec, logs)
        agent._initialize_workers(agent._worker_group)
        created.append(agent)
        return agent

    yield make_agent
    for agent in created:
        agent._stop_workers(agent._worker_group)


def monitored(agent: Any, state: WorkerState) -> Any:
    """Poll until a worker ends: torch's contexts offer no event to wait for."""
    while (result := agent._monitor_workers(agent._worker_group)).state == WorkerState.HEALTHY:
        os.sched_yield()
    assert result.state == state
    return result


def test_one_worker_is_replaced_while_the_other_continues(
    make: Callable[[str], Any], tmp_path: Path
) -> None:
    agent = make(PROGRAM)
    group = agent._worker_group
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY
    before = get_pids(agent._pcontext_dict)
    agent._restart_workers(get_fault_workers(group, [1]))
    after = get_pids(agent._pcontext_dict)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    assert not psutil.pid_exists(before[1])
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY
    os.kill(after[1], signal.SIGKILL)
    result = monitored(agent, WorkerState.FAILED)
    assert set(result.failures) == {1}
    assert result.failures[1].exitcode == -signal.SIGKILL
    agent._stop_workers(group)
    assert not any(map(psutil.pid_exists, after.values()))


def test_each_worker_has_its_own_log_and_variables(
    make: Callable[[str], Any], tmp_path: Path
) -> None:
    agent = make('echo "$RANK $LOCAL_RANK $RESTART_FAULT_PROCESS_TYPE"')
    monitored(agent, WorkerState.SUCCEEDED)
    for rank in (0, 1):
        (log,) = (tmp_path / "logs" / str(rank)).rglob("stdout.log")
        assert log.read_text() == f"{rank} {rank} pod\n"
    env = torch_patch.get_worker_env(agent, agent._worker_group, agent._worker_group.workers[1])
    assert (env["RANK"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "True")
    assert torch_patch.get_use_agent_store(agent._worker_group.spec)


def test_single_context_is_started_and_stopped(make: Callable[[str], Any], tmp_path: Path) -> None:
    agent = make("exec sleep 1000")
    group = agent._worker_group
    worker = group.workers[0]
    env = torch_patch.get_worker_env(agent, group, worker)
    folder = str(tmp_path / "one")
    context = torch_patch.start_processes_with_log_dir(agent, group, worker, env, folder)
    assert torch_patch.context_wait_task(context) is None
    torch_patch.stop_worker_task(context)
    assert not psutil.pid_exists(context.pids()[0])
    os.symlink(folder, tmp_path / "link")
    with pytest.raises(ValueError, match="is a symbolic link"):
        torch_patch.start_processes_with_log_dir(agent, group, worker, env, str(tmp_path / "link"))


def test_each_attempt_uses_its_own_store_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def rendezvous(url: str) -> Iterator[tuple[Any, int, int]]:
        yield store, 0, 1

    wrapped = torch_patch.patch_create_c10d_store_decorator(rendezvous)
    ((first, rank, size),) = wrapped("env://")
    first.set("key", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ((second, _, _),) = wrapped("env://")
    assert (rank, size) == (0, 1)
    assert not second.check(["key"])
    assert store.check(["/worker/attempt_0/key"])


def test_zero_max_restarts_means_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "taskd.agent.seams.torchrun.TORCHS_LAUNCH", lambda *arguments: calls.append(arguments)
    )
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=0)
    torch_patch.patch_launch_agent(config, "script", [])
    assert calls[0][0].max_restarts == 32767
    assert torch_patch.patch_default_signal() == signal.SIGKILL
