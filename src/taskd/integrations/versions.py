"""Which versions of a framework an adapter was written for."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from taskd.errors import SettingsError


def check(package: str, first: str, before: str) -> None:
    """Raise SettingsError if the installed version is not in the range."""
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


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
