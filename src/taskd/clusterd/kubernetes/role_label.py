"""The label of this replica's own pod: the Service selects the pod whose label says that it leads.

The API server may be away when the label has to change, for example because its restart has cost
the leader its lease. An old label would send jobs to a replica that does not lead, so the label is
written again and again until it is right.
"""

from __future__ import annotations

import asyncio
import logging

from taskd.clusterd.kubernetes.api_client import MERGE_PATCH, PODS, ApiClient, ApiFailed

log = logging.getLogger(__name__)

ROLE, LEADER = "taskd/role", "leader"


class RoleLabel:
    def __init__(self, api: ApiClient, namespace: str, pod: str, again_s: float) -> None:
        """`pod`: empty if there is none to label. At first the label of an earlier incarnation of
        the pod's container is removed."""
        self._api, self._pod, self._again_s = api, pod, again_s
        self._path = PODS.path(namespace, pod)
        self._leads = False
        self._changed = asyncio.Event()
        self.current = not pod
        """This process has written the label: it does not speak of an earlier one."""
        self._writing: asyncio.Task[None] | None = None
        if pod:
            self._writing = asyncio.create_task(self._keep(), name="label of the own pod")

    def lead(self) -> None:
        """From now on the Service shall find this pod."""
        self._leads = True
        self._changed.set()

    async def close(self) -> None:
        """The Service shall not find this pod any more. There is one try: this process ends, and
        the next one in this pod would remove the label."""
        if self._writing is None:
            return
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._writing = None
        if self._leads:
            try:
                await self._write(leads=False)
            except ApiFailed as error:
                log.warning("pod=%s keeps the label of a leader: %s", self._pod, error)

    async def _keep(self) -> None:
        problem = ""
        while True:
            self._changed.clear()
            try:
                await self._write(leads=self._leads)
            except ApiFailed as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("pod=%s cannot be labelled, trying again: %s", self._pod, problem)
                await asyncio.sleep(max(self._again_s, error.retry_after_s))
            else:
                problem, self.current = "", True
                await self._changed.wait()

    async def _write(self, *, leads: bool) -> None:
        patch = {"metadata": {"labels": {ROLE: LEADER if leads else None}}}
        await self._api.request("PATCH", self._path, patch, MERGE_PATCH)
