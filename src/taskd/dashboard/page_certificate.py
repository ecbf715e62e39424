"""The certificate of the page, which can be renewed while it is served.

A context of Python's uses what it has loaded last, for every new connection.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from taskd.bus.security import check_pair, read_pem
from taskd.errors import SettingsError

log = logging.getLogger(__name__)

LOOK_S = 2.0


async def follow(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load changed files. What cannot be used is named in the log. Runs forever."""
    files = ("key", key), ("certificate", certificate)
    used, problem = read_pem(*files), ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            found = read_pem(*files)
            if found != used:
                check_pair(*found)
                context.load_cert_chain(certificate, key)
                used, problem = found, ""
                log.info("the certificate of the page was renewed: %s", certificate)
        except (SettingsError, ValueError, OSError) as error:  # ssl.SSLError is an OSError
            if str(error) != problem:
                problem = str(error)
                log.warning("the changed certificate of the page is not used: %s", problem)
