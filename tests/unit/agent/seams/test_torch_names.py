"""The launcher refuses a torch that lacks a private name which it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from taskd.agent.seams import torch_names
from taskd.agent.zygote.torch_store import prefix_keys_by_attempt
from taskd.errors import UnknownTorch
from taskd.runtime.private_names import PrivateName, check_torch, find_owner, missing
from taskd.runtime.torch_versions import supported_torch

ALL = (
    *torch_names.TORCHRUN,
    *torch_names.CONTEXTS,
    *torch_names.STORE,
    *torch_names.GROUPS,
)


def test_installed_torch_has_every_name() -> None:
    assert missing(ALL) == []


@pytest.mark.parametrize("hidden", ALL, ids=str)
def test_missing_name_is_refused_with_its_purpose(hidden: PrivateName) -> None:
    def find(entry: PrivateName) -> Any:
        return object() if entry == hidden else find_owner(entry)

    with pytest.raises(UnknownTorch) as refusal:
        check_torch(ALL, find)
    assert f"torch {torch.__version__} lacks {hidden}, which TaskD needs for" in str(refusal.value)
    assert hidden.purpose in str(refusal.value)
    assert f"Supported: {supported_torch()}" in str(refusal.value)


def test_zygote_refuses_a_torch_without_the_store_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.delattr(rendezvous, "_create_c10d_store")
    with pytest.raises(UnknownTorch, match="_create_c10d_store"):
        prefix_keys_by_attempt()


def test_too_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(UnknownTorch, match=r"torch 2\.5\.1 is too old"):
        torch_names.check(torch_names.STORE)
