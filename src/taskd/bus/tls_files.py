"""The TLS files of a client's channel, which an operator may renew while it is in use.

gRPC keeps the certificates with which a channel was created, for every connection. So after a
failed call the files are read again, and if they have changed, a new channel replaces the old one.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence

import grpc
from grpc import aio

from taskd.bus.security import ClusterdTlsSettings, check_pair, clusterd_files, read_pem
from taskd.errors import SettingsError

log = logging.getLogger(__name__)


class TlsFiles:
    def __init__(self, whose: str, files: Sequence[tuple[str, str]]) -> None:
        """`files` are (name, path). Raises SettingsError if one cannot be used."""
        self._whose, self._files = whose, files
        self._used = read_pem(*files)
        self._problem = ""

    @classmethod
    def of(cls, settings: ClusterdTlsSettings) -> TlsFiles:
        return cls("clusterd", clusterd_files(settings))

    def channel(self, address: str, options: Sequence[tuple[str, int]]) -> aio.Channel:
        """With the files as they were last used, also if they cannot be read any more.

        Without files it is not encrypted.
        """
        if not self._files:
            return aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(*self._used)
        return aio.secure_channel(address, credentials, options=options)

    def are_renewed(self) -> bool:
        """Whether they have changed since the last call, and can be used."""
        try:
            found = read_pem(*self._files)
            if found == self._used:
                return False
            if len(found) == 3:
                check_pair(found[1], found[2])
        except (SettingsError, ValueError, ssl.SSLError, OSError) as error:
            if (problem := str(error)) != self._problem:  # once: calls are made every second
                self._problem = problem
                log.warning("the changed TLS files of %s are not used: %s", self._whose, problem)
            return False
        self._used, self._problem = found, ""
        log.info("%s: TLS files were renewed: %s", self._whose, self._files[0][1])
        return True
