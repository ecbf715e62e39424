"""host:port as people write it: names, IPv4, IPv6 with or without brackets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address

from taskd.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise SettingsError([f"{text!r} is not an address: expected host:port"])
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not host or any(letter.isspace() or letter in "/@[]" for letter in host):
            raise SettingsError(
                [f"{text!r} is not an address: its host is neither a name nor an IP address"]
            )
        return Address(host, int(port))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_multicast(self) -> bool:
        try:
            return ip_address(self.host).is_multicast
        except ValueError:
            return False

    def why_not(self) -> str:
        """Why listening there fails. gRPC does not report the reason."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, there = found[0]
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(there)
                trial.listen()
        except OSError as error:
            return error.strerror or str(error)
        return "the port was in use a moment ago"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def reserved_port(host: str, port: int = 0) -> socket.socket:
    """Keeps a port for another program until it is closed. 0: any free one.

    That program must set SO_REUSEADDR, as most servers do. No other one gets the port meanwhile,
    and no connection leaves from it. Raises OSError: the port is in use.
    """
    kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if port:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, port))
        # Only now: with it, two of these could get the same free port.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        kept.close()
        raise
    return kept


def free_port() -> int:
    """A port that is free now; another process may take it before the caller listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
