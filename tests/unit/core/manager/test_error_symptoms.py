"""Which exceptions are a script's own, and which only say that another rank is gone."""

from __future__ import annotations

import pytest

from taskd.core.manager.script_errors import is_symptom
from taskd.model.messages import ScriptError

C10D = "/lib/torch/distributed/distributed_c10d.py:2000"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ScriptError(("RuntimeError", "Exception"), "train.py:9", "gloo/transport/tcp: …"), True),
        (ScriptError(("RuntimeError", "Exception"), C10D, "no key"), True),
        (ScriptError(("DistBackendError", "RuntimeError"), "train.py:9", "NCCL error"), True),
        (ScriptError(("RuntimeError", "Exception"), "train.py:9", "shapes differ"), False),
        (ScriptError(("ValueError", "Exception"), C10D, "ProcessGroupNCCL needs GPUs"), False),
        (ScriptError(("TypeError", "Exception"), "ddp.py:9", "the hook requires NCCL 2.10"), False),
    ],
)
def test_mistake_of_the_script_is_not_taken_for_a_lost_peer(
    error: ScriptError, expected: bool
) -> None:
    assert is_symptom(error) is expected
