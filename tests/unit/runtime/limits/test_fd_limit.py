"""A server takes as many open files as it may, and no more than it can use."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from taskd.runtime.limits.fd_limit import ENOUGH, raise_fd_limit


@pytest.fixture
def hard() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_low_limit_is_raised_to_the_hard_limit(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_fd_limit()
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)


def test_high_limit_is_kept(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    raise_fd_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
