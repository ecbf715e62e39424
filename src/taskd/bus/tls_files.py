"""The TLS files of a client's channel, which an operator may renew while it is in use.

gRPC keeps the certificates with which a channel was created, for every connection. So after a
failed call the files are read again, and if they have changed, a new channel replaces the old one.
"""

from __future__ import annotations

import logging
import ssl

import grpc

from taskd.bus.security import ClusterdTlsSettings, check_pair, read_pem
from taskd.errors import SettingsError

log = logging.getLogger(__name__)


class TlsFiles:
    def __init__(self, whose: str, ca: str, key: str = "", crt: str = "") -> None:
        """Raises SettingsError if a file cannot be used. An empty name: there is no such file."""
        self._whose = whose
        named = (("ca", ca), ("client key", key), ("client certificate", crt))
        self._files = [(name, path) for name, path in named if path]
        self._used = read_pem(*self._files)
        self._problem = ""

    @classmethod
    def of(cls, settings: ClusterdTlsSettings) -> TlsFiles:
        return cls("clusterd", settings.ca, settings.key, settings.crt)

    def credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they were last used, also if they cannot be read any more."""
        return grpc.ssl_channel_credentials(*self._used)

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
