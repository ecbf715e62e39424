"""Loads settings from the environment; the only module that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from taskd.errors import SettingsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

environ: Mapping[str, str] = os.environ
"""For the documented variables of other projects (RANK, MASTER_ADDR, POD_IP, …)."""


def prepare_grpc() -> None:
    """Make gRPC fit into a process that is not ours. It reads these once, when it is imported.

    It must write nothing on stderr, which is the user's: not every closed connection, and not a
    line for each call of a stranger with too many headers. And it must not act
    when the process forks: its handlers are made for children that use gRPC, and they crash or
    block the children that a training script forks (DataLoader workers, multiprocessing). Values
    that the user has set are kept.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def direct_nccl(interface: str, adapter: str) -> None:
    """NCCL reads these when it creates a communicator; it has no other interface for them."""
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    if adapter:
        os.environ["NCCL_IB_HCA"] = f"={adapter}"


def use_compile_cache(path: str) -> None:
    """Where torch.compile keeps its code; inductor has no other interface for it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = path


def keep_alive_under_nccl() -> None:
    """Keep torch from ending the process when NCCL has lost a peer.

    Launchers set it so. And torch would delay the abort to dump its flight recorder.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def compile_in_process() -> bool:
    """Inductor reads this when it is imported: how many processes compile. Kept if the user set it.

    Two or more start a pool of processes, which takes longer than reading compiled code from the
    cache. False: the user wants a pool.
    """
    return os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1") == "1"


_TRUE, _FALSE = {"1", "on", "true", "yes"}, {"0", "off", "false", "no"}


def load(kind: type[T], environ: Mapping[str, str] = os.environ, prefix: str = "TASKD") -> T:
    """Read `TASKD_LISTEN`, `TASKD_RECOVERY_STOP_TIMEOUT_S` and so on. SettingsError has all
    problems."""
    problems: list[str] = []
    config = _load(kind, environ, prefix, problems)
    if config is None:
        raise SettingsError(problems)
    return config


@cache
def type_hints(kind: type) -> dict[str, Any]:
    """The type of each field. It takes longer than all the rest, and a process loads some twice."""
    return get_type_hints(kind)


def _load(kind: type[T], environ: Mapping[str, str], prefix: str, problems: list[str]) -> T | None:
    values: dict[str, Any] = {}
    hints = type_hints(kind)
    for item in fields(kind):
        name, hint = f"{prefix}_{item.name}".upper(), hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            values[item.name] = _load(hint, environ, name, problems)
        elif name in environ:
            try:
                values[item.name] = _parse(hint, environ[name])
            except ValueError:
                problems.append(f"{name} must be {_name(hint)}, got {environ[name]!r}")
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append(f"{name} is not set")
    if problems:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        problems.append(f"{prefix}_*: {error}")
        return None


def _parse(hint: Any, text: str) -> Any:
    if isinstance(hint, UnionType):
        return _parse(next(kind for kind in get_args(hint) if kind is not NoneType), text)
    if hint is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(text)
        return text.lower() in _TRUE
    return hint(text)


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
