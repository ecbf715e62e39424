"""Positions, network settings and messages, as the documented Python layer passes them around."""

from __future__ import annotations

from dataclasses import dataclass, field

LOCAL_HOST = "127.0.0.1"

CONFIG_UPSTREAMIP_KEY = "UpstreamAddr"
CONFIG_LISTENIP_KEY = "ListenAddr"
CONFIG_UPSTREAMPORT_KEY = "UpstreamPort"
CONFIG_LISTENPORT_KEY = "ListenPort"
CONFIG_ROLE_KEY = "Role"
CONFIG_SERVERRANK_KEY = "ServerRank"
CONFIG_PROCESSRANK_KEY = "ProcessRank"
CONFIG_FRAMEWORK_KEY = "Framework"

DEFAULT_PROXY_UPSTREAMPORT = "9601"
DEFAULT_PRXOY_LISTENPORT = "9602"
"""Spelled as others import it."""
DEFAULT_AGENT_UPSTREAMPORT = "9602"
DEFAULT_PROXY_ROLE = "Proxy"
DEFAULT_AGENT_ROLE = "Agent"
DEFAULT_SERVERRANK = "0"
DEFAULT_PROCESSRANK = "-1"
DEFAULT_BIZTYPE = "DEFAULT"


@dataclass
class Position:
    role: str
    server_rank: str
    process_rank: str


@dataclass
class TLSConfig:
    ca: str
    server_key: str
    server_crt: str
    client_key: str
    client_crt: str


@dataclass
class NetworkConfig:
    pos: Position
    upstream_addr: str
    listen_addr: str
    enable_tls: bool
    tls_conf: TLSConfig | None


@dataclass
class MessageInfo:
    uuid: str
    biz_type: str
    dst: Position
    body: str


@dataclass
class MsgBody:
    msg_type: str
    code: int
    message: str
    extension: dict[str, str]


@dataclass
class AgentReportInfo:
    fault_ranks: list[int] = field(default_factory=list)
    restart_times: int = -1
