"""The process of a node that writes continuous checkpoints, and what is left of them at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from taskd.agent.run.plan import Plan
from taskd.agent.run.supervisor import CannotStart, Supervisor
from taskd.agent.worker_environment import base_environment, secrets_of_ranks
from taskd.runtime.files import checkpoint_folders
from taskd.runtime.files.checkpoint_folders import MODEL_FILE

WRITER = "taskd.torch.checkpoints.checkpoint_writer"


class CheckpointProcess:
    """Started with the job. Whatever happens to it, the job goes on."""

    def __init__(self, plan: Plan, shared: str, say: Callable[[str], None]) -> None:
        """`shared`: the node's folder in shared memory."""
        self._shared, self._directory, self._say = Path(shared), Path(plan.dump_dir), say
        env = {**base_environment(plan), **secrets_of_ranks(plan), "OMP_NUM_THREADS": "1"}
        env["TASKD_JOB_ID"], env["TASKD_TOKEN"] = plan.job, ""
        arguments = WRITER, shared, plan.dump_dir
        module = "taskd.agent.run.beside.idle_process"
        self._supervisor = Supervisor("checkpoint writer", module, arguments, env)

    async def keep_running(self) -> None:
        self._supervisor.start()
        try:
            await self._supervisor.keep_running()
        except CannotStart as error:
            self._say(f"no more checkpoints are written: {error}. Training continues")

    async def stop(self, succeeded: bool) -> None:
        """`succeeded`: no start resumes from this job's checkpoints any more."""
        await self._supervisor.stop(0.0)
        try:
            model = (self._shared / MODEL_FILE).read_text()
        except OSError:
            if succeeded:
                self._say(
                    "--checkpoint-every: no checkpoint was written: the script does not use "
                    "taskd.torch, or had fewer steps"
                )
            return
        if succeeded:
            checkpoint_folders.retire(self._directory, model)
