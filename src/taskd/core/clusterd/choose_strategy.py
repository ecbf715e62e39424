"""Chooses the next strategy, and says why.

The first one on the ladder without an objection wins. An objection is a reason in words; the
sentence names the objection to every configured strategy that was rejected over.
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
    """By the job, in the words of the wire."""
    retryable: bool
    """All faults can be retried, and all are of the same kind."""
    in_place: bool
    """At least one lost process can restart on its device."""
    master_lost: bool = False
    """The pod of node 0 is among the lost ones."""
    pods_back: bool = False
    """The scheduler has already found new pods."""
    platform: str | None = None
    """The strategy that the platform has named, empty if it has not; None: no platform."""
    history: tuple[Attempt, ...] = ()
    max_interruptions: int = 3
    exit_is_final: bool = False
    """No scheduler starts the job again, and its manager counts repairs that bring no new step."""
    dump_useless: bool = False
    from_ascend: bool = False
    """Ascend's MindIO repairs the ranks."""


@dataclass(frozen=True, slots=True)
class Choice:
    strategy: Strategy
    because: str


def choose(question: Question) -> Choice:
    """There is always a choice, because nothing objects to `exit`."""
    rejected: list[str] = []
    interrupted = None
    for strategy in LADDER:
        if strategy not in question.configured and strategy is not Strategy.EXIT:
            continue
        objection = objection_to(strategy, question)
        if strategy is Strategy.EXIT and interrupted is not None and question.exit_is_final:
            rejected.append("nothing else is left")
            return Choice(interrupted, _sentence(interrupted, rejected))
        if not objection:
            return Choice(strategy, _sentence(strategy, rejected))
        if objection == _too_often(strategy, question):
            interrupted = strategy
        rejected.append(f"{strategy}: {objection}")
    raise AssertionError("exit has no objections")


def objection_to(strategy: Strategy, question: Question) -> str:
    """Why the strategy cannot be used; empty if it can."""
    if strategy is Strategy.EXIT:
        return ""
    if strategy.on_wire not in question.offered:
        return "the job does not offer it"
    if question.platform is not None and strategy.on_wire != question.platform:
        return f"the platform wants {question.platform or 'none'}"
    past, unfit = _past(strategy, question), _unfit(strategy, question)
    return past or unfit or _too_often(strategy, question)


def _past(strategy: Strategy, question: Question) -> str:
    """Objections from what was tried before."""
    for attempt in question.history:
        if not attempt.interrupted:
            if strategy is attempt.strategy:
                return "it has failed"
            if LADDER.index(strategy) < LADDER.index(attempt.strategy):
                return f"{attempt.strategy} has failed already"
            if attempt.strategy is Strategy.RETRY and _ruled_out(strategy, attempt.code):
                return f"the retry failed with {attempt.code}"
            if question.from_ascend and _ends_in_dump(attempt) and strategy is not Strategy.DUMP:
                return f"after {attempt.strategy} failed, MindIO can only save or exit"
    return ""


def _too_often(strategy: Strategy, question: Question) -> str:
    interruptions = sum(a.strategy is strategy and a.interrupted for a in question.history)
    if interruptions < question.max_interruptions:
        return ""
    return f"new faults interrupted it {interruptions} times"


def _ends_in_dump(attempt: Attempt) -> bool:
    failed = attempt.code == RecoverCode.UnRecoverableRetryError
    return failed and attempt.strategy is not Strategy.RETRY


def _ruled_out(strategy: Strategy, code: int) -> bool:
    """The code of a failed retry may exclude other strategies."""
    if code in (RecoverCode.OK, RecoverCode.RecoverableRetryError):
        return False
    if strategy in (Strategy.RECOVER_IN_PLACE, Strategy.RECOVER):
        return True
    return strategy is Strategy.DUMP and code == RecoverCode.ClientError


def _unfit(strategy: Strategy, question: Question) -> str:
    """Objections from the faults themselves."""
    match strategy:
        case Strategy.RETRY if not question.retryable:
            return "the fault cannot be retried"
        case Strategy.RECOVER_IN_PLACE if not question.in_place:
            return "no lost process can restart on its device"
        case Strategy.ELASTIC if question.master_lost:
            return "node 0 is lost"
        case Strategy.ELASTIC if question.pods_back:
            return "the scheduler has found new pods"
        case Strategy.DUMP if question.dump_useless:
            return "this framework cannot save after a failed NIC switch"
        case _:
            return ""


def _sentence(strategy: Strategy, rejected: list[str]) -> str:
    if not rejected:
        return f"{strategy} is the first choice"
    return f"{strategy} is chosen ({'; '.join(rejected)})"
