"""Every combination of configured, offered, possible and tried strategies has a valid choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.clusterd.choose_strategy import Question, choose, objection_to
from taskd.core.clusterd.job_facts import Attempt
from taskd.model.strategies import LADDER, Strategy, parse_strategies

ATTEMPTS = st.builds(
    Attempt, st.sampled_from(LADDER), st.sampled_from([-1, -1, 405, 406, 407, 499, 503])
)
QUESTIONS = st.builds(
    Question,
    configured=st.sets(st.sampled_from(LADDER)).map(lambda s: tuple(x for x in LADDER if x in s)),
    offered=st.sets(st.sampled_from(["retry", "recover", "downgrade", "dump", "exit"])).map(tuple),
    retryable=st.booleans(),
    in_place=st.booleans(),
    master_lost=st.booleans(),
    pods_back=st.booleans(),
    platform=st.sampled_from([None, "", "retry", "recover", "dump", "exit"]),
    history=st.lists(ATTEMPTS, max_size=6).map(tuple),
    dump_useless=st.booleans(),
)


@given(QUESTIONS)
def test_first_strategy_without_objection_is_chosen(question: Question) -> None:
    choice = choose(question)
    wanted = [s for s in LADDER if s in question.configured or s is Strategy.EXIT]
    assert choice.strategy == next(s for s in wanted if not objection_to(s, question))
    for passed in wanted[: wanted.index(choice.strategy)]:
        assert f"{passed}: {objection_to(passed, question)}" in choice.because


@given(QUESTIONS)
def test_only_configured_and_offered_strategies_are_chosen(question: Question) -> None:
    strategy = choose(question).strategy
    if strategy is not Strategy.EXIT:
        assert strategy in question.configured
        assert strategy.on_wire in question.offered


@given(QUESTIONS)
def test_failed_strategy_is_followed_by_a_later_one(question: Question) -> None:
    failed = [a.strategy for a in question.history if not a.interrupted]
    if failed:
        lowest = max(map(LADDER.index, failed))
        strategy = choose(question).strategy
        assert strategy is Strategy.EXIT or LADDER.index(strategy) > lowest


@given(QUESTIONS)
def test_with_a_platform_only_its_strategy_or_exit_is_chosen(question: Question) -> None:
    strategy = choose(question).strategy
    if question.platform is not None:
        assert strategy.on_wire in (question.platform, "exit")


def test_each_failure_moves_one_step_down_the_ladder() -> None:
    history: tuple[Attempt, ...] = ()
    climbed = []
    for _ in LADDER:
        choice = choose(
            Question(
                configured=LADDER,
                offered=("retry", "recover", "downgrade", "dump", "exit"),
                retryable=True,
                in_place=True,
                history=history,
            )
        )
        climbed.append(choice.strategy)
        history = (*history, Attempt(choice.strategy, 405))
    assert climbed == list(LADDER)


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("", "exit"),
        ("retry", "retry exit"),
        (" dump , retry ", "retry dump exit"),
        ("exit,recover,,recover", "recover exit"),
        ("elastic-training,recover-in-place", "recover-in-place elastic-training exit"),
    ],
)
def test_strategies_are_read_with_blanks_in_any_order(text: str, strategies: str) -> None:
    assert " ".join(parse_strategies(text)) == strategies


def test_unknown_strategies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown value 'Retry', 'repair' \(expected retry, re"):
        parse_strategies("repair, dump, Retry")
