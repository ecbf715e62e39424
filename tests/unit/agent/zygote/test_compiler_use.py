"""A standby learns whether its job uses torch.compile."""

from __future__ import annotations

import _ctypes
import mmap
import os
import shutil
import socket
from pathlib import Path

import pytest

from taskd.agent.zygote import compiler_use


def test_rank_that_has_mapped_compiled_code_uses_the_compiler(tmp_path: Path) -> None:
    assert not compiler_use.runs_compiled_code(os.getpid())
    code = Path(shutil.copy(_ctypes.__file__, tmp_path / "code.main.so"))
    with code.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert compiler_use.runs_compiled_code(os.getpid())


def test_waiting_ends_with_a_message_or_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_use, "FIRST_LOOK_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not compiler_use.wait(ours, sibling=0)
        assert not compiler_use.wait(ours, sibling=2**22 + 1), "no such process"
        theirs.send(b"start")
        assert not compiler_use.wait(ours, sibling=os.getpid())
