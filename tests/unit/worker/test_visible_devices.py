"""A standby starts the driver only if all ranks of the node see what it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.worker.visible_devices import may_start_driver, write_report


def report(folder: Path, *environments: dict[str, str] | None) -> list[Path]:
    """One file per rank; None: it has not finished a step yet."""
    paths = [folder / f"{rank}.json" for rank in range(len(environments))]
    for path, environ in zip(paths, environments, strict=True):
        if environ is not None:
            write_report(path, environ)
    return paths


def test_driver_starts_when_all_ranks_see_what_the_standby_sees(tmp_path: Path) -> None:
    assert may_start_driver(report(tmp_path, {}, {"OTHER": "1"}), {"HOME": "/"}) is True
    same = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert may_start_driver(report(tmp_path, same, same), same) is True


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_driver_is_not_started_when_a_script_has_chosen_devices(tmp_path: Path, name: str) -> None:
    assert may_start_driver(report(tmp_path, {}, {name: "1"}), {}) is False
    assert may_start_driver(report(tmp_path, None, {name: "1"}), {}) is False
    assert may_start_driver(report(tmp_path, {name: "1"}, {name: "1"}), {name: "0"}) is False


def test_driver_waits_for_the_reports_of_all_ranks(tmp_path: Path) -> None:
    assert may_start_driver(report(tmp_path, {}, None), {}) is None
