"""The six recovery strategies, and how users and peers spell them."""

from __future__ import annotations

from enum import StrEnum


class WireStrategy(StrEnum):
    """A strategy as the Recover service spells it: in orders, in offers and in results.

    A word that is not listed here is kept as a plain string (see `wire_strategy`), so that it can
    be refused by name.
    """

    RETRY = "retry"
    RECOVER = "recover"
    """Replace the lost processes; the order's extra parameters say whether in place."""
    DOWNGRADE = "downgrade"
    """Continue without the lost ranks."""
    UPGRADE = "upgrade"
    """Grow back; offered by a job that runs without some of its ranks."""
    DUMP = "dump"
    EXIT = "exit"
    CONTINUE = "continue"
    """Resume after a pause for an operation."""
    MIGRATION = "migration"
    """Resume in the backup pod of a hot switch."""


class Strategy(StrEnum):
    """In the order in which they are tried, from the cheapest to the end of the job."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"

    @property
    def on_wire(self) -> WireStrategy:
        """The word in which the job is ordered to do it, and in which the job must offer it."""
        return _ON_WIRE.get(self) or WireStrategy(self.value)


_ON_WIRE = {
    Strategy.RECOVER_IN_PLACE: WireStrategy.RECOVER,
    Strategy.ELASTIC: WireStrategy.DOWNGRADE,
}

LADDER = tuple(Strategy)


def by_user_name(word: WireStrategy | str) -> Strategy | WireStrategy | str:
    """The strategy of a wire's word, under the name that users give it in `--strategies`."""
    return Strategy.ELASTIC if word == WireStrategy.DOWNGRADE else word


def wire_strategy(text: str) -> WireStrategy | str:
    """Read a strategy from the wire. An unknown word stays as it is."""
    try:
        return WireStrategy(text)
    except ValueError:
        return text


def parse_strategies(text: str, name: str = "recover-strategy") -> tuple[Strategy, ...]:
    """Read a list separated by commas. Blanks are allowed, and `exit` is always added.

    Raises ValueError, which names the setting (`name`) and the unknown words.
    """
    strategies, problem = known_strategies(text, name)
    if problem:
        raise ValueError(problem)
    return strategies


def known_strategies(text: str, name: str) -> tuple[tuple[Strategy, ...], str]:
    """Like `parse_strategies`, without the unknown words; and what is wrong with them, if any."""
    words = [word for word in map(str.strip, text.split(",")) if word]
    unknown = sorted({word for word in words if word not in list(Strategy)})
    wanted = {Strategy(word) for word in words if word not in unknown} | {Strategy.EXIT}
    strategies = tuple(strategy for strategy in LADDER if strategy in wanted)
    if not unknown:
        return strategies, ""
    words_shown = ", ".join(map(repr, unknown))
    expected = f"{', '.join(LADDER[:-1])} or {LADDER[-1]}"
    return strategies, f"{name}: unknown value {words_shown} (expected {expected})"
