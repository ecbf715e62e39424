"""Coverage is measured for the first batch of seeds only, and for the two smallest simulators.

Coverage makes a simulation three times slower, and further seeds reach hardly any further lines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEASURED_FILES = {"test_agent.py", "test_worker.py"}
FIRST_BATCH = "[from0]"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        measured = item.path.name in MEASURED_FILES or item.name.endswith(FIRST_BATCH)
        if HERE in item.path.parents and not measured:
            item.add_marker(pytest.mark.no_cover)
