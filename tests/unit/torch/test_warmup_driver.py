"""When a standby starts the driver of the devices, and when it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from taskd import config
from taskd.errors import SettingsError
from taskd.torch.profiling import optimizer_hook
from taskd.torch.startup import warmup
from taskd.worker.visible_devices import DeviceUse, write_report

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a device; what is started on it."""
    calls: list[str] = []
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(warmup, "_has_devices", lambda: True)
    monkeypatch.setattr(warmup, "_devices_at_start", None)
    monkeypatch.setattr(warmup, "train", lambda: calls.append("a training step"))
    monkeypatch.setattr(warmup, "use_device", lambda device: calls.append(f"device {device}"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: calls.append("the driver"))
    return calls


def test_driver_starts_once_all_ranks_have_finished_a_step(
    tmp_path: Path, started: list[str]
) -> None:
    reports = [tmp_path / "0", tmp_path / "1"]
    write_report(reports[0], {})
    assert not warmup.start_driver(reports)
    assert started == []
    write_report(reports[1], {})
    assert warmup.start_driver(reports)
    assert started == ["the driver", "a training step"]
    assert not warmup.driver_has_other_devices()


def test_standby_makes_itself_ready_on_the_device_of_all_ranks(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path / "0", config.environ, DeviceUse(1, 0.5))
    assert warmup.start_driver([tmp_path / "0"])
    assert started == ["the driver", "a training step", "device 1"]
    monkeypatch.setenv("TASKD_WARM_DEVICE", "0")
    assert warmup.start_driver([tmp_path / "0"])
    assert started[3:] == ["the driver", "a training step"]


def test_driver_is_left_alone_when_the_script_chooses_devices(
    tmp_path: Path, started: list[str]
) -> None:
    write_report(tmp_path / "0", {VISIBLE: "0"})
    assert warmup.start_driver([tmp_path / "0"])
    assert started == []
    assert not warmup.driver_has_other_devices()


def test_driver_is_left_alone_without_ranks(started: list[str]) -> None:
    assert not warmup.start_driver([])
    assert started == []


def test_machine_without_devices_has_no_driver_to_start(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_has_devices", lambda: False)
    assert warmup.start_driver([])
    assert started == []


@pytest.mark.usefixtures("started")
def test_devices_chosen_after_the_start_of_the_driver_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path / "0", {})
    assert warmup.start_driver([tmp_path / "0"])
    monkeypatch.setenv(VISIBLE, "1")
    assert warmup.driver_has_other_devices()
    with pytest.raises(SettingsError, match=f"the script has set {VISIBLE}"):
        optimizer_hook._report_devices()


def test_rank_reports_its_devices_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "devices.json"
    monkeypatch.setenv("TASKD_DEVICES_FILE", str(path))
    monkeypatch.setenv(VISIBLE, "3")
    monkeypatch.setattr(optimizer_hook, "_has_reported", False)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    torch.autograd.backward(weight.sum())
    optimizer.step()
    assert '"CUDA_VISIBLE_DEVICES": "3"' in path.read_text()
    path.unlink()
    optimizer.step()
    assert not path.exists()


def test_build_for_cuda_on_a_machine_without_devices_trains_in_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(warmup, "DEVICE_FILES", ("/dev/no-such-device*",))
    assert not warmup._has_devices()
    monkeypatch.setattr(warmup, "DEVICE_FILES", ("/dev/null",))
    assert warmup._has_devices()
