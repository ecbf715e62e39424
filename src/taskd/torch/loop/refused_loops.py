"""Loops over the steps that would give a wrong result, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.errors import SettingsError

_AGAIN = (
    "To train again from the start, as for the next fold or seed, use one loop over all of it, and "
    "reset the weights and the optimizer inside an attempt"
)


def protected_twice() -> SettingsError:
    return SettingsError(
        [
            "protect() was called twice: a second call would replace the first. Give everything to "
            f"one call: protect(model=[…], optimizer=[…]). {_AGAIN}"
        ]
    )


def nothing_left(total: int, finished: int) -> SettingsError:
    """The number of a step counts those of all loops."""
    return SettingsError(
        [
            f"steps({total}) was called after a loop over {finished} steps: nothing is left to do, "
            "because steps are counted over the whole script. To train on, pass the sum of both, "
            f"such as steps({finished + total}). {_AGAIN}"
        ]
    )


def counters(names: Iterable[str]) -> SettingsError:
    """A replacement enters the loop in the middle."""
    around = " and ".join(names)
    return SettingsError(
        [
            f"the loop over the steps uses {around}(): in the replacement of a lost rank it would "
            "begin at its start. Count with the number of the step, which is an int, and choose by "
            "it what belongs to the step"
        ]
    )
