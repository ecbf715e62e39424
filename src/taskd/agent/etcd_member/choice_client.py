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

LOOK_S, CONNECT_S = 0.2, 3.0
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
    unserved_since = None
    async for _ in Tries(every(LOOK_S), deadline=monotonic() + within_s):
        try:
            found = await say(home, key, name, offer)
            if not found.uses or found.serves:
                return found
            unserved_since = None
        except FAILED as error:
            log.debug("choice of etcd: %r", error)
            if not await _accepts(manager):
                unserved_since = None
                continue
            now = monotonic()
            unserved_since = now if unserved_since is None else unserved_since
            limit_s = FOREIGN_S if isinstance(error, OtherProgram) else UNSERVED_S
            if now - unserved_since > limit_s:
                return Answer(uses=False)
            if now > unserved_since:
                heard = await _say_there(home, manager, key, name, offer)
                if heard is not None:
                    return heard
    raise SettingsError(
        [
            f"node 0 did not answer within {within_s:g} s, neither at {home} nor, its manager, at "
            f"{manager}: is its launcher running there, with the same TASKD_TOKEN and --job-id?"
        ]
    )


async def _say_there(
    home: Address, manager: Address, key: str, name: str, offer: Offer
) -> Answer | None:
    """Node 0 listens at the manager's address, too, while it waits: later than at `home`, so that
    a node that gets an answer only there cannot reach `home`. None: it does not wait."""
    cannot = (
        f"it reaches {manager}, but not {home}, where it would look for etcd. Open that port on "
        "node 0"
    )
    unreachable = replace(offer, cannot_use=offer.cannot_use or cannot)
    try:
        return await say(manager, key, name, unreachable)
    except FAILED as error:
        log.debug("choice of etcd: %r", error)
        return None


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
