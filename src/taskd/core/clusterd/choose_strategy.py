"""Which strategy comes next, and the sentence that says why.

The first on the ladder to which nobody objects. An objection is a reason in words; the sentence
names those against every strategy that the user wanted and does not get.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.core.clusterd.job_facts import Attempt
from taskd.model.codes import RecoverCode
from taskd.model.strategies import LADDER, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    configured: tuple[Strategy, ...]
    offered: tuple[str, ...]
    """By the job, in its own words."""
    retryable: bool
    """Every fault passes by itself, and they are all of one kind."""
    in_place: bool
    """At least one lost process can come back where it was."""
    master_lost: bool = False
    """The pod of node 0 is among the lost ones."""
    pods_back: bool = False
    """The scheduler has found new pods by itself."""
    platform: str | None = None
    """What the platform has named; None: there is no platform."""
    history: tuple[Attempt, ...] = ()
    max_interruptions: int = 3
    dump_useless: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    strategy: Strategy
    because: str


def choose(question: Question) -> Choice:
    """`exit` is always open, so there always is a choice."""
    passed: list[str] = []
    for strategy in LADDER:
        if strategy not in question.configured and strategy is not Strategy.EXIT:
            continue
        objection = objection_to(strategy, question)
        if not objection:
            return Choice(strategy, _sentence(strategy, passed))
        passed.append(f"{strategy}: {objection}")
    raise AssertionError("nothing ever speaks against exit")


def objection_to(strategy: Strategy, question: Question) -> str:
    """Why not; empty when nothing speaks against it."""
    if strategy is Strategy.EXIT:
        return ""
    if strategy.on_wire not in question.offered:
        return "the job does not offer it"
    if question.platform is not None and strategy.on_wire != question.platform:
        return f"the platform wants {question.platform or 'nothing'}"
    return _past(strategy, question) or _unfit(strategy, question)


def _past(strategy: Strategy, question: Question) -> str:
    """What was tried before speaks against it."""
    for attempt in question.history:
        if not attempt.interrupted:
            if strategy is attempt.strategy:
                return "it has failed"
            if LADDER.index(strategy) < LADDER.index(attempt.strategy):
                return f"{attempt.strategy} has failed already"
            if attempt.strategy is Strategy.RETRY and _ruled_out(strategy, attempt.code):
                return f"the retry failed with {attempt.code}"
    cut_short = sum(a.strategy is strategy and a.interrupted for a in question.history)
    if cut_short >= question.max_interruptions:
        return f"cut short by new faults {cut_short} times"
    return ""


def _ruled_out(strategy: Strategy, code: int) -> bool:
    """A retry may say in which ways its state is beyond help."""
    if code in (RecoverCode.OK, RecoverCode.RecoverableRetryError):
        return False
    if strategy in (Strategy.RECOVER_IN_PLACE, Strategy.RECOVER):
        return True
    return strategy is Strategy.DUMP and code == RecoverCode.ClientError


def _unfit(strategy: Strategy, question: Question) -> str:
    """The faults themselves speak against it."""
    match strategy:
        case Strategy.RETRY if not question.retryable:
            return "the fault does not pass by itself"
        case Strategy.RECOVER_IN_PLACE if not question.in_place:
            return "no lost process can come back on its device"
        case Strategy.ELASTIC if question.master_lost:
            return "node 0 is lost"
        case Strategy.ELASTIC if question.pods_back:
            return "new pods have been found"
        case Strategy.DUMP if question.dump_useless:
            return "this framework cannot save after a failed link switch-over"
        case _:
            return ""


def _sentence(strategy: Strategy, passed: list[str]) -> str:
    if not passed:
        return f"{strategy} is the first choice"
    return f"{strategy}, as {'; '.join(passed)}"
