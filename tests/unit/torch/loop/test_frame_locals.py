"""Variables of a running function are read and set, and nothing stays alive because of it."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from taskd.torch.loop import frame_locals


class Batch:
    pass


def caller() -> FrameType:
    return sys._getframe(1)


def test_what_the_script_replaces_is_not_kept_alive() -> None:
    frame = caller()
    batch = Batch()
    assert frame_locals.read(frame)["batch"] is batch
    first = weakref.ref(batch)
    batch = Batch()
    assert first() is None


def test_what_was_there_when_variables_were_set_is_not_kept_alive() -> None:
    frame = caller()
    batch, count = Batch(), 1
    frame_locals.put(frame, {"count": 2})
    assert count == 2
    first = weakref.ref(batch)
    batch = Batch()
    assert first() is None


def test_dictionary_of_the_script_is_left_to_it() -> None:
    frame = caller()
    size = 3
    settings: dict[str, Any] = locals()
    assert frame_locals.read(frame)["size"] == size
    assert settings["size"] == size


def test_variables_of_a_module_are_the_global_ones() -> None:
    space: dict[str, Any] = {"caller": caller, "frame": None}
    exec("frame = caller()", space)
    frame = space["frame"]
    assert frame_locals.is_module(frame)
    assert frame_locals.read(frame) is space
    frame_locals.put(frame, {"n": 1})
    assert space["n"] == 1
    assert not frame_locals.is_module(caller())
