"""Which versions of a framework an adapter was written for, and the names that it needs there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from taskd.errors import SettingsError
from taskd.runtime.private_names import PrivateName, find_owner, missing, with_purposes


def check(
    package: str,
    first: str,
    before: str,
    names: Iterable[PrivateName] = (),
    find: Callable[[PrivateName], Any] = find_owner,
) -> None:
    """Raise SettingsError if the installed version is not in the range, or lacks a name."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise SettingsError(
            [f"{package} is not installed: pip install '{package}>={first}'"]
        ) from None
    if not _numbers(first) <= _numbers(installed) < _numbers(before):
        raise SettingsError(
            [
                f"{package} {installed} is installed, but this adapter was written for {first} up "
                f"to, not including, {before}: another version may call its methods in another "
                f"order. Install '{package}>={first},<{before}'"
            ]
        )
    lacking = missing(names, find)
    if lacking:
        raise SettingsError(
            [
                f"{package} {installed} lacks {with_purposes(lacking)}. Install another version of "
                f"'{package}>={first},<{before}', or leave the adapter out and let a fault restart "
                "the ranks from your own checkpoint"
            ]
        )


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
