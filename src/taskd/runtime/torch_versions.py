"""Which versions of torch TaskD is tested with: the one list.

`make test-torch TORCH=x.y.z` tests each of them. The bounds of the extra `torch`, the README and
the support matrix repeat the list, and a test compares them with it; messages are made from it.
"""

from __future__ import annotations

import re
from enum import Enum
from importlib.metadata import PackageNotFoundError, version

TESTED = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""One release of each minor version, in order."""


class Support(Enum):
    TOO_OLD = "too old"
    TESTED = "tested"
    NEWER = "newer"
    """Not tested. It is tried if it has every private name that TaskD relies on."""
    UNREADABLE = "unreadable"


def minor(text: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu". Raises ValueError."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ValueError(f"not a version: {text!r}")
    return int(found[1]), int(found[2])


OLDEST, NEWEST = minor(TESTED[0]), minor(TESTED[-1])


def judge(text: str) -> Support:
    """What this version means for a job."""
    try:
        number = minor(text)
    except ValueError:
        return Support.UNREADABLE
    if number < OLDEST:
        return Support.TOO_OLD
    return Support.TESTED if number <= NEWEST else Support.NEWER


def supported_torch() -> str:
    """For messages: "torch 2.9 to 2.15"."""
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    return f"torch {oldest} to {newest}"


def requirement() -> str:
    """What the extra `torch` asks pip for."""
    (major, oldest), (_, newest) = OLDEST, NEWEST
    return f"torch>={major}.{oldest},<{major}.{newest + 1}"


def installed_torch() -> str | None:
    """The version that pip has installed, without importing it. None: there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
