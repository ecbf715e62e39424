"""torchelastic's events, one JSON object per line, for `--event-log-handler console`.

Names and fields are torchelastic's, so that a program that reads torchrun's events can read ours.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

from taskd.agent.run.plan import Plan
from taskd.core.agent.machine import Done, State
from taskd.model.agent import Ended, Event, WorkerStarted


class EventLog:
    """Observes one node's machine, event by event."""

    def __init__(
        self, plan: Plan, write: Callable[[str], object], clock: Callable[[], float]
    ) -> None:
        self._plan, self._write, self._clock = plan, write, clock
        self._began = clock()

    def observe(self, event: Event, before: State, after: State) -> None:
        if isinstance(event, WorkerStarted):
            self._write_event("WORKER", "START", event.rank, event.pid, None, after)
        if isinstance(after, Done) and not isinstance(before, Done):
            for rank, worker in sorted(after.workers.items()):
                if isinstance(worker, Ended):
                    exited = worker.exited
                    code = -exited.signal if exited.signal is not None else exited.exit_code
                    state = "SUCCEEDED" if exited.finished else "FAILED"
                    self._write_event("WORKER", state, rank, exited.pid, code, after)
            self._write_event(
                "AGENT", "FAILED" if after.exit_code else "SUCCEEDED", None, 0, None, after
            )

    def _write_event(
        self, source: str, what: str, rank: int | None, pid: int, code: int | None, now: State
    ) -> None:
        plan = self._plan
        details: dict[str, object] = {
            "group_world_size": plan.nodes,
            "entry_point": plan.program.target,
        }
        if rank is not None:
            _, local_rank = plan.node_and_local_rank(rank)
            details |= {
                "local_rank": [local_rank],
                "role_rank": [rank],
                "role_world_size": [plan.world_size],
                "exit_code": [code],
                "worker_pid": [pid],
            }
        metadata = {
            "run_id": plan.run_id,
            "global_rank": rank,
            "group_rank": plan.node,
            "worker_id": None if rank is None else str(pid),
            "role": plan.role,
            "hostname": socket.getfqdn(),
            "state": what,
            "total_run_time": int(self._clock() - self._began),
            "rdzv_backend": "static",
            "raw_error": None,
            "metadata": json.dumps(details),
            "agent_restarts": now.node.attempt,
            "duration_ms": None,
        }
        event = {
            "name": f"torchelastic.worker.status.{what}",
            "source": source,
            "timestamp": int(1000 * self._clock()),
            "metadata": metadata,
        }
        self._write(json.dumps(event))
