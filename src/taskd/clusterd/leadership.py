"""Takes a lease, keeps it, and says when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from taskd.core.record import Lease, StoreUnreachable

log = logging.getLogger(__name__)


class Leadership:
    def __init__(
        self, lease: Lease, period_s: float, pause_s: Callable[[], float] | None = None
    ) -> None:
        """`pause_s`: how long to wait before the next try to take the lease."""
        self._lease, self._period_s, self._pause_s = lease, period_s, pause_s
        self.lost = asyncio.Event()
        """Set at the end of our term: this process must not decide any more."""
        self._renewing: asyncio.Task[None] | None = None

    async def win(self) -> int:
        """Wait until this process leads. The epoch of its term."""
        problem = ""
        while True:
            try:
                epoch = await self._lease.acquire()
            except StoreUnreachable as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("%s; trying again", problem)
            else:
                problem = ""
                if epoch is not None:
                    log.info("this process leads: epoch=%d", epoch)
                    self._renewing = asyncio.create_task(self._renew(), name="renewal of the lease")
                    return epoch
            await asyncio.sleep(self._period_s if self._pause_s is None else self._pause_s())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            reason = "another process has taken it"
            try:
                renewed = await self._lease.renew()
            except StoreUnreachable as error:
                renewed, reason = self._lease.held, str(error)
                log.warning("the lease could not be renewed: %s", reason)
            if not renewed and not self._lease.held:
                log.error("the lease is lost, this process stops deciding: %s", reason)
                self.lost.set()
                return

    async def close(self) -> None:
        """Give the lease back, so that another process need not wait until it expires."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            await self._lease.release()
        except StoreUnreachable as error:
            log.warning("%s; it expires by itself", error)
