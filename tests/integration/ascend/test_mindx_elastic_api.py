"""`mindx_elastic`: what its import does to torchrun, and its log."""

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


def test_import_without_torch_raises_with_the_reason() -> None:
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


def test_package_does_not_import_torch() -> None:
    done = run("import sys, mindx_elastic; assert 'torch' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")


def test_import_patches_torchrun() -> None:
    done = run(
        "import taskd.ascend.documented.torchrun_patch as seam\n"
        "called = []\n"
        "seam.patch_torch_method = lambda: called.append(1)\n"
        "seam._patch_elastic_agent = lambda: None\n"
        "import mindx_elastic.api\n"
        "assert called == [1]\n"
        "mindx_elastic.api.patch_torch_methods()\n"
        "assert called == [1, 1]\n"
    )
    assert done.returncode == 0, done.stderr


def test_import_replaces_the_three_functions_that_its_page_names() -> None:
    done = run(
        "import torch.distributed.elastic.agent.server.api as server\n"
        "import torch.distributed.launcher.api as launcher\n"
        "agent = server.SimpleElasticAgent\n"
        "before = agent._invoke_run, agent._initialize_workers, launcher.launch_agent\n"
        "import mindx_elastic.api\n"
        "after = agent._invoke_run, agent._initialize_workers, launcher.launch_agent\n"
        "assert not set(before) & set(after)\n"
    )
    assert done.returncode == 0, done.stderr


def test_torchrun_runs_a_script_after_the_import(tmp_path: Path) -> None:
    """Without a manager, torch's own agent runs it; it waits for no reset file."""
    script = tmp_path / "script.py"
    script.write_text("import os; os.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n")
    done = run(
        "import mindx_elastic.api\n"
        "from torch.distributed import run\n"
        f"run.main(['--standalone', '--nproc-per-node=2', {str(script)!r}])\n",
        TASKD_PROCESS_ENABLE="off",
        ELASTIC_LOG_PATH=str(tmp_path / "log"),
        TASKD_LOG_PATH=str(tmp_path / "log"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0", "rank 1"]


PATCHES = (
    "import taskd.ascend.documented.torchrun_patch as seam\n"
    "seam.patch_torch_method = lambda: print('patched')\n"
    "seam._patch_elastic_agent = lambda: None\n"
    "import mindx_elastic.api\n"
)


@pytest.mark.parametrize("value", ["1", "0", "", "on"])
def test_torchrun_is_patched_only_if_the_switch_is_1(tmp_path: Path, value: str) -> None:
    log = tmp_path / "log"
    done = run(PATCHES, ELASTIC_PROCESS_RECOVER_ENABLE=value, ELASTIC_LOG_PATH=str(log))
    assert done.returncode == 0, done.stderr
    assert ("patched" in done.stdout) == (value == "1")
    if value != "1":
        expected = f"ELASTIC_PROCESS_RECOVER_ENABLE is '{value}', not 1"
        assert expected in (log / "run.log").read_text()


LOGS = (
    "import logging\n"
    "import taskd.ascend.documented.elastic_log\n"
    "log = logging.getLogger('logRun')\n"
    "assert log is taskd.ascend.documented.elastic_log.run_log\n"
    "(handler,) = log.handlers\n"
    "handler.max_bytes = LIMIT\n"
    "for number in range(12):\n"
    "    log.info('line %d\\n%s', number, 'x' * 2000)\n"
    "logging.getLogger('taskd.clusterd').warning('from taskd')\n"
)


def test_log_has_the_documented_format_and_modes(tmp_path: Path) -> None:
    log = tmp_path / "made" / "log"
    done = run(LOGS.replace("LIMIT", str(20 * 1024 * 1024)), ELASTIC_LOG_PATH=str(log))
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = (log / "run.log").read_text().splitlines()
    assert len(lines) == 12
    pattern = re.compile(r"\[[\d-]+ [\d:,]+\]\[INFO\]\[line \d+\\nx+\.\.\.\]")
    assert all(pattern.fullmatch(line) and line.count("x") < 1024 for line in lines)
    assert last.endswith("[from taskd]")
    assert (log.stat().st_mode & 0o777, (log / "run.log").stat().st_mode & 0o777) == (0o750, 0o640)


def test_eight_full_logs_are_kept(tmp_path: Path) -> None:
    done = run(LOGS.replace("LIMIT", "1500"), ELASTIC_LOG_PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    backups = [path for path in tmp_path.iterdir() if path.name != "run.log"]
    assert len(backups) == 8
    assert {path.stat().st_mode & 0o777 for path in backups} == {0o400}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the owner of a directory")
def test_log_of_another_owner_is_not_written(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    done = run(LOGS.replace("LIMIT", "0"), ELASTIC_LOG_PATH=str(tmp_path))
    assert done.returncode == 0
    assert "belongs to another user and group" in done.stderr
    assert "line 11" in done.stderr
    assert not list(tmp_path.iterdir())
