"""Weights that a forward pass changes by itself are brought back, too."""

from __future__ import annotations

import torch
from torch import nn

from taskd.torch.state import pieces
from taskd.torch.state.protected import Protected
from taskd.torch.state.undo import Undo


def teacher_and_student() -> tuple[Undo, nn.Conv2d, nn.Conv2d]:
    torch.manual_seed(0)
    student, teacher = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    return Undo(Protected([student, teacher], optimizer, None, {})), student, teacher


def move(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


def test_change_is_noticed_at_once_and_undone_from_then_on() -> None:
    undo, student, teacher = teacher_and_student()
    undo.save(with_gradients=False)
    move(teacher, student)
    undo.notice_changes()
    for _ in range(2):
        before = [one.clone() for one in teacher.parameters()]
        undo.save(with_gradients=False)
        move(teacher, student)
        assert undo.restore()
        assert all(map(torch.equal, teacher.parameters(), before))


def test_change_that_was_not_expected_makes_the_state_unusable_once() -> None:
    undo, student, teacher = teacher_and_student()
    undo.save(with_gradients=False)
    teacher.weight.data = teacher.weight.data * 2
    assert not undo.restore()
    undo.save(with_gradients=False)
    move(teacher, student)
    assert undo.restore()


def test_nothing_is_copied_where_only_the_optimizer_changes_weights() -> None:
    undo, student, _ = teacher_and_student()
    undo.save(with_gradients=False)
    undo.notice_changes()
    with torch.no_grad():
        student.weight.add_(1)
    assert undo.restore(is_updated=True)
    undo.save(with_gradients=False)
    assert undo.restore()


def test_scaler_that_is_disabled_has_nothing_to_save() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    protected = Protected(model, optimizer, scaler, {})
    undo = Undo(protected)
    undo.save(with_gradients=False)
    assert undo.restore()
    assert not undo.left_gradients()
    pieces.load_plain_state(protected, pieces.plain_state(protected, {}))


def test_weights_that_get_new_memory_are_still_watched() -> None:
    undo, _, teacher = teacher_and_student()
    undo.save(with_gradients=False)
    teacher.weight.data = teacher.weight.data.clone()
    undo.notice_changes()
    assert undo.restore(), "the values are the same"
    undo.save(with_gradients=False)
    teacher.weight.data = teacher.weight.data + 1
    assert not undo.restore()
