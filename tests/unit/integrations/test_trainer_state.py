"""The state of a Trainer survives a round trip, and an abandoned step leaves no trace in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from taskd.integrations.trainer_state import (
    CallbackParts,
    HistoryPart,
    PositionPart,
    RankPart,
    SharedPart,
)


class Control:
    should_log = False

    def state(self) -> dict[str, Any]:
        return {"args": {"should_log": self.should_log}}


class Counting:
    def __init__(self) -> None:
        self.count, self.bar = 0, object()


def trainer() -> Any:
    state = SimpleNamespace(
        epoch=0.0,
        global_step=0,
        best_metric=None,
        best_global_step=None,
        best_model_checkpoint=None,
        stateful_callbacks={},
        total_flos=0,
        num_input_tokens_seen=0,
        log_history=[],
    )
    return SimpleNamespace(
        state=state,
        control=Control(),
        current_flos=0.0,
        model=SimpleNamespace(config=SimpleNamespace(problem_type=None, sizes=[4])),
        args=SimpleNamespace(device="cpu"),
        callback_handler=SimpleNamespace(callbacks=[Counting()]),
    )


def test_state_goes_to_another_trainer() -> None:
    here, there = trainer(), trainer()
    here.state.global_step, here.control.should_log = 7, True
    here._tr_loss, here._total_loss_scalar = torch.tensor(0.1) * 3, 2.5
    here.state.log_history.append({"loss": 0.1})
    here.callback_handler.callbacks[0].count = 4
    for kind in (PositionPart, RankPart, HistoryPart, CallbackParts):
        kind(there).load_state_dict(kind(here).state_dict())
    shared = SharedPart(there, 30)
    shared.load_state_dict(SharedPart(here, 6).state_dict())
    assert shared.total == 6, "the training was ordered to stop"
    assert there.state.global_step == 7
    assert there.control.should_log
    assert torch.equal(there._tr_loss, here._tr_loss)
    assert there.state.log_history == [{"loss": 0.1}]
    assert there.callback_handler.callbacks[0].count == 4


def test_what_a_pass_of_the_model_configures_goes_to_another_trainer() -> None:
    """As the kind of problem, which a classifier finds out when it sees its first labels."""
    here, there = trainer(), trainer()
    shared, other = SharedPart(here, 6), SharedPart(there, 6)
    before = shared.state_dict()
    here.model.config.problem_type, here.model.config.passes = "regression", 3
    shared.notice_configured()
    other.load_state_dict(shared.state_dict())
    assert vars(there.model.config) == vars(here.model.config)
    other.load_state_dict(before)
    assert vars(there.model.config) == {"problem_type": None, "sizes": [4]}


def test_log_keeps_its_list() -> None:
    here = trainer()
    part, history = HistoryPart(here), here.state.log_history
    before = part.state_dict()
    history.append({"loss": 0.1})
    part.load_state_dict(before)
    assert history == []
    assert here.state.log_history is history


def test_log_that_has_become_empty_again_is_an_empty_text() -> None:
    here = trainer()
    part, history = HistoryPart(here), here.state.log_history
    before = part.state_dict()
    history.append({"loss": 0.1})
    after = part.state_dict()
    part.load_state_dict(before)
    assert part.state_dict() == before
    part.load_state_dict(after)
    assert history == [{"loss": 0.1}]


def test_log_that_grows_is_the_same_text_as_when_it_is_encoded_at_once() -> None:
    here = trainer()
    part, history = HistoryPart(here), here.state.log_history
    for step in range(3):
        history.append({"loss": torch.tensor(0.5), "step": step, "what": object})
        part.state_dict()
    assert part.state_dict() == HistoryPart(here).state_dict()
    assert part.state_dict() is part.state_dict(), "it is read again only if it is new"
    other = trainer()
    HistoryPart(other).load_state_dict(part.state_dict())
    assert HistoryPart(other).state_dict() == part.state_dict()


def test_objects_of_a_callback_are_left_alone() -> None:
    here = trainer()
    bar = here.callback_handler.callbacks[0].bar
    part = CallbackParts(here)
    part.load_state_dict(part.state_dict())
    assert here.callback_handler.callbacks[0].bar is bar


def test_object_that_a_callback_opens_in_a_replacement_is_kept() -> None:
    here, there = trainer(), trainer()
    opened, late = object(), there.callback_handler.callbacks[0]
    late.bar = None
    part = CallbackParts(there)
    part.load_state_dict(CallbackParts(here).state_dict())
    late.bar = opened  # as in on_train_begin
    part.load_state_dict(part.loaded)
    assert late.bar is opened


def test_state_from_before_the_training_leaves_what_it_has_opened() -> None:
    """A rank can go back to its own copy of the first step."""
    here = trainer()
    callback = here.callback_handler.callbacks[0]
    callback.bar = None
    part = CallbackParts(here)
    before = part.state_dict()
    callback.bar, callback.count = object(), 1
    part.notice_objects()
    part.load_state_dict(before)
    assert callback.bar is not None
    assert callback.count == 0


def test_callback_that_is_left_out_keeps_its_values() -> None:
    here, there = trainer(), trainer()
    here.callback_handler.callbacks[0].count = 4
    state = CallbackParts(here, left_out=(Counting,)).state_dict()
    CallbackParts(there, left_out=(Counting,)).load_state_dict(state)
    assert there.callback_handler.callbacks[0].count == 0
