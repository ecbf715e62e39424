"""An adapter refuses versions that it was not written for, and says which ones it was."""

from __future__ import annotations

import pytest

from taskd.errors import SettingsError
from taskd.integrations import versions
from taskd.runtime.private_names import PrivateName


@pytest.mark.parametrize("installed", ["5.22", "5.22.2", "5.22.10.dev0"])
def test_version_in_the_range_is_accepted(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: installed)
    versions.check("transformers", "5.22", "5.23")


@pytest.mark.parametrize("installed", ["4.57.1", "5.21.9", "5.23.0", "6.0"])
def test_other_version_is_refused_with_the_range(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: installed)
    with pytest.raises(SettingsError, match=r"'transformers>=5\.22,<5\.23'"):
        versions.check("transformers", "5.22", "5.23")


def test_missing_package_is_named() -> None:
    with pytest.raises(SettingsError, match="no-such-package is not installed"):
        versions.check("no-such-package", "1.0", "2.0")


def test_missing_name_is_refused_with_its_purpose() -> None:
    there = PrivateName("pytest", "raises", "another test")
    missing = PrivateName("pytest", "no_such_name", "a test")
    with pytest.raises(SettingsError) as refusal:
        versions.check("pytest", "1.0", "100.0", [there, missing])
    assert " lacks pytest.no_such_name, which TaskD needs for a test. Install" in str(refusal.value)
    assert "'pytest>=1.0,<100.0'" in str(refusal.value)
