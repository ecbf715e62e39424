"""The seam to torchrun: one subclass of torch's own agent, assigned where torchrun takes it from.

Everything up to the start of workers stays torch's: arguments, rendezvous, ranks, the store,
events, the report of a failure. From there the node runs as with `taskd run` (`node.py`): workers
come from a zygote, and the manager decides. If no manager can be reached, or if the job is of a
kind that we cannot take over, torch's own agent runs it unchanged; the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api as launcher

from taskd.agent.node import NodeRun
from taskd.agent.node_resources import NodeResources, run_folders, worker_processes
from taskd.agent.run.plan import PRELOAD, UNLIMITED_RESTARTS, LogSettings, Plan
from taskd.agent.seams import torch_names
from taskd.agent.seams.torchrun_contexts import uses_agent_store
from taskd.agent.worker_output import WorkerOutput
from taskd.agent.zygote.program import Program
from taskd.bus.security import membership
from taskd.config import environ
from taskd.core.agent.machine import Done, State
from taskd.errors import SettingsError, UnknownTorch
from taskd.model.agent import Ended, Event, Interrupted
from taskd.model.messages import WorkerExited
from taskd.proxy import Proxy, started

log = logging.getLogger(__name__)

TORCHS_LAUNCH = launcher.launch_agent
TORCHS_RUN, TORCHS_INITIALIZE = torch_names.run_and_initialize(SimpleElasticAgent)
"""torch's own functions, before any patch replaces them."""

JOIN_S, REQUIRED_JOIN_S = 10.0, 180.0
"""How long to wait for a manager: by default, and with TASKD_PROCESS_ENABLE=on."""

PERMISSION_S = 900.0
SHUTDOWN_S = 30.0


def install() -> bool:
    """Let torchrun use our agent. False: torch is left unchanged, and the log says why."""
    try:
        torch_names.check((*torch_names.TORCHRUN, *torch_names.CONTEXTS))
    except UnknownTorch as problem:
        log.error("torchrun is left unchanged: %s", problem)
        return False
    setattr(launcher, "LocalElasticAgent", ElasticAgent)  # noqa: B010 - torch marks it as final
    return True


class ElasticAgent(LocalElasticAgent):
    """Torch's agent, but our zygote and manager run the workers."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        result: RunResult | None = self._take_over()
        return TORCHS_RUN(self, role) if result is None else result

    def _take_over(self) -> RunResult | None:
        try:
            node, program, logs = _take_over_inputs(self)
        except SettingsError as refusal:
            log.warning("torch's own agent runs this job, without TaskD: %s", refusal)
            return None
        output = WorkerOutput()
        with run_folders() as folders:
            try:
                seam = _Seam(self, node, program, logs, output, folders)
                done = asyncio.run(seam.run())
                return None if done is None else seam.result(done)
            finally:
                output.stop()

    def worker_group(self) -> WorkerGroup:
        group: WorkerGroup = torch_names.worker_group(self)
        return group


def _take_over_inputs(agent: ElasticAgent) -> tuple[int, Program, DefaultLogsSpecs]:
    """The node's rank, its program and its logs; raises SettingsError if we cannot take over."""
    if environ.get("TASKD_PROCESS_ENABLE") == "off":
        raise SettingsError(["TASKD_PROCESS_ENABLE is off"])
    spec = agent.worker_group().spec
    if not isinstance(spec.entrypoint, str):
        raise SettingsError(["its workers are Python functions, not a script"])
    logs = torch_names.logs_specs(agent)
    if not isinstance(logs, DefaultLogsSpecs):
        raise SettingsError([f"its logs are set by {type(logs).__name__}, not DefaultLogsSpecs"])
    node = getattr(spec.rdzv_handler, "rank", None)
    if node is None:
        named = environ.get("RANK", "")
        settings = getattr(spec.rdzv_handler, "settings", None)
        single = getattr(settings, "max_nodes", 0) == 1
        node = 0 if single else int(named) if named.isdecimal() else None
    if node is None:
        remedy = "use --rdzv-backend static, or set RANK"
        raise SettingsError([f"this rendezvous does not give the node's rank first: {remedy}"])
    return int(node), _program(spec.entrypoint, [str(word) for word in spec.args]), logs


def _program(entrypoint: str, words: list[str]) -> Program:
    if entrypoint == sys.executable and words[:1] == ["-u"]:
        if words[1:2] == ["-m"]:
            return Program("module", words[2], tuple(words[3:]))
        return Program("script", words[1], tuple(words[2:]))
    return Program("exec", entrypoint, tuple(words))


@dataclass
class _Seam:
    agent: ElasticAgent
    node: int
    program: Program
    logs: DefaultLogsSpecs
    output: WorkerOutput
    folders: tuple[str, str]
    node_run: NodeRun | None = None
    stopped_by: int | None = None

    async def run(self) -> Done | None:
        """None: there is no manager, so torch's own agent has to run the job."""
        proxy = await self._join()
        if proxy is None:
            return None
        try:
            # Torch's rendezvous blocks until every node has joined.
            await asyncio.to_thread(torch_names.rendezvous, self.agent)
            plan = self._plan()
            processes = worker_processes(plan, self.folders)
            processes.open()
            group = self.agent.worker_group()
            store = f"{group.master_addr}:{group.master_port}"
            resources = NodeResources(
                processes=processes,
                run_dir=self.folders[0],
                beacons=self.folders[1],
                store=store,
                served_store=store if plan.node == 0 else "",
            )
            self.node_run = NodeRun(plan, resources, self.output, proxy, self._observe)
            return await self.node_run.run()
        finally:
            await proxy.close()

    async def _join(self) -> Proxy | None:
        """The node's proxy, once it has joined the manager; None: no manager answered."""
        host = environ.get("MASTER_ADDR") or "127.0.0.1"
        settings = {"UpstreamAddr": host, "ServerRank": str(self.node)}
        proxy = await started(settings, environ)
        required = environ.get("TASKD_PROCESS_ENABLE") == "on"
        timeout_s = REQUIRED_JOIN_S if required else JOIN_S
        if await proxy.bus.join(timeout_s):
            return proxy
        log.warning(
            "no manager answered within %g s, torch's own agent runs this job: %s",
            timeout_s,
            proxy.bus.disconnect_reason,
        )
        await proxy.close()
        return None

    def _plan(self) -> Plan:
        agent, group = self.agent, self.agent.worker_group()
        spec, workers = group.spec, group.workers
        size = spec.local_world_size
        handled = environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        # Torch counts restarts down from its own maximum; here 0 means no limit.
        restarts = spec.max_restarts or UNLIMITED_RESTARTS
        job, token = membership(environ)
        return Plan(
            program=self.program,
            spawn=self.program.kind == "exec" or environ.get("TASKD_START_METHOD") == "spawn",
            preload=(*PRELOAD, *filter(None, environ.get("TASKD_PRELOAD", "").split(","))),
            job=job,
            run_id=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            nodes=group.group_world_size or 1,
            node=self.node,
            local_size=size,
            world_size=workers[0].world_size,
            first_rank=workers[0].global_rank,
            max_restarts=restarts,
            master_addr=str(group.master_addr),
            master_port=group.master_port,
            token=token,
            logs=_log_settings(
                self.logs, size, torch_names.log_line_prefix_template(self.agent) or ""
            ),
            signals=tuple(signal.Signals[name] for name in handled.split(",") if name),
            grace_s=torch_names.shutdown_timeout_s(agent, SHUTDOWN_S),
            join_timeout_s=PERMISSION_S,
            virtual_local_rank=bool(getattr(spec, "virtual_local_rank", False)),
            prefix="",
            agent_store=uses_agent_store(spec.rdzv_handler),
        )

    def _observe(self, event: Event, before: State, after: State) -> None:
        if isinstance(event, Interrupted):
            self.stopped_by = event.signal

    def result(self, done: Done) -> RunResult:
        """The node's result, as torch's launcher expects it to report it and to choose the code."""
        if self.stopped_by is not None:
            signum = signal.Signals(self.stopped_by)
            raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)
        if done.exit_code == 0:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(done.node.ranks))
        exits = (worker.exited for worker in done.workers.values() if isinstance(worker, Ended))
        failures = {int(each.rank): self._failure(each) for each in exits if not each.finished}
        if not failures:
            log.error("job ended: %s", done.because)
            sys.exit(done.exit_code)
        return RunResult(WorkerState.FAILED, failures=failures)

    def _failure(self, exited: WorkerExited) -> ProcessFailure:
        assert self.node_run is not None
        code = -exited.signal if exited.signal is not None else exited.exit_code
        error_file = self.node_run.logs.files(exited.rank, exited.incarnation).error
        local_rank = exited.rank - self.node_run.plan.first_rank
        return ProcessFailure(local_rank, exited.pid, code or 1, str(error_file))


def _log_settings(specs: DefaultLogsSpecs, size: int, line_prefix: str) -> LogSettings:
    root, redirects, tee, shown = torch_names.log_settings(specs)
    return LogSettings(
        directory="" if root == os.devnull else root,
        redirects={rank: int(std) for rank, std in to_map(redirects, size).items()},
        tee={rank: int(std) for rank, std in to_map(tee, size).items()},
        shown=frozenset(shown) if shown else None,
        line_prefix=line_prefix,
    )
