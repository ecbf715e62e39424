"""The dump of process groups, for real ranks and for processes without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.python.adaptor.pytorch import group_info

RANK = """
import sys, torch.distributed as dist
from taskd.python.adaptor.pytorch.group_info import dump_group_info
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
dist.new_group([0, 2], group_desc="pair")
dump_group_info()
dist.barrier()
dist.destroy_process_group()
"""


def test_each_rank_writes_its_groups(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MINDX_TASK_ID": "job-1",
        "GROUP_BASE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], env=environment
        )
        for rank in range(3)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0, 0]
    written = [
        json.loads((tmp_path / "job-1" / str(rank) / "parallel_group.json").read_text())
        for rank in range(3)
    ]
    pairs = [
        {tuple(group["global_ranks"]): group["group_rank"] for group in groups.values()}
        for groups in written
    ]
    assert pairs == [{(0, 1, 2): 0, (0, 2): 0}, {(0, 1, 2): 1}, {(0, 1, 2): 2, (0, 2): 1}]
    names = [group["group_name"] for group in written[0].values()]
    assert names.count("default_group") == 1


def test_without_torch_no_groups_are_written() -> None:
    code = (
        "import sys\n"
        "from taskd.python.adaptor.pytorch.group_info import dump_group_info, get_group_info\n"
        "assert get_group_info(0) == {}\n"
        "dump_group_info()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_save_path_refuses_links_and_missing_job_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_BASE_DIR", str(tmp_path))
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    assert group_info.get_save_path(3) == ""
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    assert group_info.get_save_path(3) == str(tmp_path / "job-1" / "3")
    (tmp_path / "job-1" / "4").symlink_to(tmp_path)
    assert group_info.get_save_path(4) == ""
    (tmp_path / "job-1" / "5").touch()
    assert group_info.get_save_path(5) == ""
    (tmp_path / "job-2").symlink_to(tmp_path / "job-1")
    monkeypatch.setenv("MINDX_TASK_ID", "job-2")
    assert group_info.get_save_path(6) == ""
