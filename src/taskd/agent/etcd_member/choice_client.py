"""The other nodes' side of the choice whether the job starts an etcd (`choice_messages.py`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex

from taskd.agent.etcd_member.choice_messages import (
    FAILED,
    HELLO,
    LINE_BYTES,
    SILENT_S,
    Answer,
    body_of,
    read_signed,
    signed,
)
from taskd.core.etcd_choice import Heard, Offer
from taskd.errors import SettingsError
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every

log = logging.getLogger(__name__)

LOOK_S, CONNECT_S, NONCE_S = 0.2, 3.0, 3.0
FOREIGN_S, UNSERVED_S = 2.0, 15.0
"""How long a manager must have been there while another program answers at the address of etcd, or
none does: no etcd, then. The process that listens there may be about to be started again."""


async def say(home: Address, key: str, name: str, heard: Heard) -> Answer:
    """Say it to node 0 and wait for its choice. Raises one of FAILED.

    `name`: what the same node says later under this name replaces it.
    """
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(home.host, home.port, limit=LINE_BYTES)
    try:
        writer.write(HELLO)
        here = str(writer.get_extra_info("sockname")[0])
        nonce, mine = await _nonce(reader), token_hex(16)
        body = {"name": name, "nonce": mine, "address": here, **body_of(heard)}
        writer.write(signed(key, nonce, body))
        while (line := await _line(reader)) == b"\n":
            pass
        return Answer(**read_signed(key, mine, line))
    finally:
        writer.close()


class OtherProgram(ValueError):
    """What listens there is no part of TaskD."""


async def _nonce(reader: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(NONCE_S):
            nonce = (await _line(reader)).decode().strip()
    except (ConnectionError, EOFError, ValueError) as error:
        raise OtherProgram(str(error)) from error
    if len(nonce) != 2 * 16:
        raise OtherProgram("an answer in another protocol")
    return nonce


async def _line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(SILENT_S):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection was closed")
    return line


async def ask(
    home: Address, manager: Address, key: str, name: str, offer: Offer, within_s: float
) -> Answer:
    """Until node 0 has chosen and, if the job uses etcd, serves it. Raises SettingsError."""
    without_since = None
    async for _ in Tries(every(LOOK_S), deadline=monotonic() + within_s):
        try:
            try:
                found = await say(home, key, name, offer)
            except FAILED as error:
                log.debug("choice of etcd: %r", error)
                if not await _accepts(manager):
                    without_since = None
                    continue
                # Node 0 listens at `home` first: if it does, this time it answers.
                found = await say(home, key, name, offer)
            if not found.uses or found.serves:
                return found
            without_since = None
        except FAILED as error:
            try:
                return await say(manager, key, name, _without(offer, home, manager))
            except OtherProgram:
                pass  # the manager: node 0 has chosen, and does not say what
            except FAILED as busy:
                log.debug("choice of etcd: %r", busy)
                continue
            now = monotonic()
            without_since = now if without_since is None else without_since
            is_foreign = isinstance(error, OtherProgram | TimeoutError)
            if now - without_since > (FOREIGN_S if is_foreign else UNSERVED_S):
                return Answer(uses=False)
    raise SettingsError(
        [
            f"node 0 did not answer within {within_s:g} s, neither at {home} nor, its manager, at "
            f"{manager}: is its launcher running there, with the same TASKD_TOKEN and --job-id?"
        ]
    )


def _without(offer: Offer, home: Address, manager: Address) -> Offer:
    """What this node says at the manager's address, where node 0 listens, too, while it waits."""
    cannot = (
        f"it reaches {manager}, but not {home}, where it would look for etcd. Open that port on "
        "node 0"
    )
    return replace(offer, cannot_use=offer.cannot_use or cannot)


async def _accepts(address: Address) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
        writer.close()
    except (OSError, TimeoutError):
        return False
    return True


async def tell(home: Address, key: str, name: str, heard: Heard) -> None:
    """Say it to node 0 if that listens, whatever it answers."""
    with suppress(*FAILED):
        await say(home, key, name, heard)
