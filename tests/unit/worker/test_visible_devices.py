"""A standby starts the driver only if all ranks of the node see what it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.worker.visible_devices import (
    DeviceUse,
    common_device,
    may_start_driver,
    write_report,
)


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


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([DeviceUse(2, 0.5), DeviceUse(2, 0.4)], 2),
        ([DeviceUse(0, 0.5), DeviceUse(1, 0.5)], None),
        ([DeviceUse(0, 0.5), DeviceUse(0, 0.05)], None),
        ([DeviceUse(0, 0.5), None], None),
    ],
    ids=["one for all", "one each", "nearly full", "not used by all"],
)
def test_standby_uses_the_device_that_all_ranks_share(
    tmp_path: Path, uses: list[DeviceUse | None], expected: int | None
) -> None:
    paths = [tmp_path / str(rank) for rank in range(len(uses))]
    for path, use in zip(paths, uses, strict=True):
        write_report(path, {"HOME": "/"}, use)
    assert common_device(paths, {}) == expected


def test_standby_uses_no_device_that_a_script_has_configured(tmp_path: Path) -> None:
    """cuBLAS reads this once, and gives other sums with it."""
    path = tmp_path / "0"
    write_report(path, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, DeviceUse(0, 0.5))
    assert common_device([path], {}) is None
    assert common_device([path], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}) == 0
