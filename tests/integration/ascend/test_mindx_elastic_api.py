from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def test_without_torch_the_reason_is_told() -> None:
    done = run(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "import mindx_elastic.api\n"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: mindx_elastic.api changes how torch starts its workers, "
        "and torch is not installed"
    )


def test_the_package_itself_needs_no_torch() -> None:
    done = run("import sys, mindx_elastic; assert 'torch' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_it_patches_torch() -> None:
    done = run(
        "import taskd.python.adaptor.patch.torch_patch as seam\n"
        "called = []\n"
        "seam.patch_torch_method = lambda: called.append(1)\n"
        "import mindx_elastic.api\n"
        "assert called == [1]\n"
        "mindx_elastic.api.patch_torch_methods()\n"
        "assert called == [1, 1]\n"
    )
    assert done.returncode == 0, done.stderr


PATCHES = (
    "import taskd.python.adaptor.patch.torch_patch as seam\n"
    "seam.patch_torch_method = lambda: print('patched')\n"
    "import mindx_elastic.api\n"
)


@pytest.mark.parametrize("value", ["1", "0", "", "on"])
def test_the_switch_leaves_torchrun_as_it_is_unless_it_is_1(tmp_path: Path, value: str) -> None:
    log = tmp_path / "log"
    done = run(PATCHES, ELASTIC_PROCESS_RECOVER_ENABLE=value, ELASTIC_LOG_PATH=str(log))
    assert done.returncode == 0, done.stderr
    assert ("patched" in done.stdout) == (value == "1")
    if value != "1":
        said = f"ELASTIC_PROCESS_RECOVER_ENABLE is '{value}', not 1"
        assert said in (log / "run.log").read_text()


LOGS = (
    "import logging\n"
    "import taskd.ascend.elastic_agent.elastic_log\n"
    "log = logging.getLogger('logRun')\n"
    "assert log is taskd.ascend.elastic_agent.elastic_log.run_log\n"
    "(handler,) = log.handlers\n"
    "handler.max_bytes = LIMIT\n"
    "for number in range(12):\n"
    "    log.info('line %d\\n%s', number, 'x' * 2000)\n"
    "logging.getLogger('taskd.clusterd').warning('from below')\n"
)


def test_the_log_has_the_documented_shape_and_modes(tmp_path: Path) -> None:
    log = tmp_path / "made" / "log"
    done = run(LOGS.replace("LIMIT", str(20 * 1024 * 1024)), ELASTIC_LOG_PATH=str(log))
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = (log / "run.log").read_text().splitlines()
    assert len(lines) == 12
    shape = re.compile(r"\[[\d-]+ [\d:,]+\]\[INFO\]\[line \d+\\nx+\.\.\.\]")
    assert all(shape.fullmatch(line) and line.count("x") < 1024 for line in lines)
    assert last.endswith("[from below]")
    assert (log.stat().st_mode & 0o777, (log / "run.log").stat().st_mode & 0o777) == (0o750, 0o640)


def test_a_full_log_is_kept_eight_times(tmp_path: Path) -> None:
    done = run(LOGS.replace("LIMIT", "1500"), ELASTIC_LOG_PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    backups = [path for path in tmp_path.iterdir() if path.name != "run.log"]
    assert len(backups) == 8
    assert {path.stat().st_mode & 0o777 for path in backups} == {0o400}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory away")
def test_what_belongs_to_somebody_else_is_not_written(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    done = run(LOGS.replace("LIMIT", "0"), ELASTIC_LOG_PATH=str(tmp_path))
    assert done.returncode == 0
    assert "belongs to another user and group" in done.stderr
    assert "line 11" in done.stderr
    assert not list(tmp_path.iterdir())
