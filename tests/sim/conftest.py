"""Coverage is measured for the first seed of each test only.

Coverage makes a simulation three times slower, and further seeds reach hardly any further lines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[tuple[Path, str]] = set()
    for item in items:
        if HERE not in item.path.parents:
            continue
        test = item.path, getattr(item, "originalname", item.name)
        if test in seen:
            item.add_marker(pytest.mark.no_cover)
        seen.add(test)
