from __future__ import annotations

from taskd.commands.profile import DOMAINS
from taskd.model.profiling import EVERYTHING, NOTHING, Part, words_of


def test_status_names_what_is_recorded_as_the_option_does() -> None:
    assert words_of(EVERYTHING) == tuple(DOMAINS)
    assert words_of(Part.SAVE | Part.STEP) == ("step", "save")
    assert words_of(NOTHING) == ()
    assert DOMAINS["forward"] is Part.FORWARD
