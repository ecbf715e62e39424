"""What was equal in both ranks when the step began is taken from the peer, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from taskd.torch.loop import object_reader, object_writer, peer_values
from taskd.torch.loop.attempt_values import AT_UPDATE, OBJECTS, AttemptValues, Completed
from taskd.torch.loop.written_objects import SAME, changed

FIRST = {"step": 0, "skipped": 0, "losses": [], "rates": {}}
STEP = 4


def written(**names: Any) -> dict[str, Any]:
    """As `LoopObjects.written` gives it: what has changed since the first step."""
    first = object_writer.write(SimpleNamespace(**FIRST), ())
    new = changed(first, object_writer.write(SimpleNamespace(**(FIRST | names)), ()))
    return {} if new is SAME else {"self": new}


def completed(
    folder: Path,
    mine: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    at_update: dict[str, Any] | None = None,
) -> Completed | None:
    AttemptValues(folder, 1, f"turn{STEP % 2}-values").save(STEP, before)
    AttemptValues(folder, 1).save(STEP, after)
    return peer_values.complete(folder, STEP, mine, at_update, ("average", "best"), [1])


def test_attributes_that_were_equal_come_from_the_peer(tmp_path: Path) -> None:
    mine = {OBJECTS: written(step=4, losses=[1.0, 2.0], rates={"a": 0.5})}
    before = {OBJECTS: written(step=4, losses=[3.0, 4.0], rates={"a": 0.5})}
    after = {OBJECTS: written(step=5, losses=[3.0, 4.0, 5.0], rates={"a": 0.5, "b": 0.1})}
    found = completed(tmp_path, mine, before, after)
    assert found is not None
    there = SimpleNamespace(**(FIRST | {"losses": [1.0, 2.0]}))
    object_reader.put(found.values[OBJECTS]["self"], there)
    assert (there.step, there.losses) == (5, [1.0, 2.0])
    assert there.rates == {"a": 0.5, "b": 0.1}
    assert found.taken == ["self.step", "self.rates"]
    assert found.unknown == ["self.losses"]


def test_variables_that_were_equal_come_from_the_peer(tmp_path: Path) -> None:
    mine = {"average": 0.5, "best": 2}
    before = {"average": 0.7, "best": 2}
    found = completed(tmp_path, mine, before, {"average": 0.8, "best": 3, "loss": 0.1})
    assert found is not None
    assert found.values == {"best": 3, OBJECTS: {}}
    assert (found.taken, found.unknown) == (["best"], ["average"])


def test_what_was_done_before_the_update_is_known(tmp_path: Path) -> None:
    mine = {"average": 0.5, "best": 2, OBJECTS: written(losses=[1.0])}
    at_update = {"average": 0.6, "loss": 3.0, OBJECTS: written(losses=[1.0, 3.0])}
    AttemptValues(tmp_path, 1, AT_UPDATE).save(
        STEP, {"average": 0.8, "loss": 0.1, OBJECTS: written(losses=[4.0, 0.1])}
    )
    before = {"average": 0.7, "best": 2, OBJECTS: written(losses=[4.0])}
    after = {"average": 0.8, "best": 3, OBJECTS: written(losses=[4.0, 0.1], step=1)}
    found = completed(tmp_path, mine, before, after, at_update)
    assert found is not None
    assert (found.taken, found.unknown) == (["best", "self.step"], [])
    AttemptValues(tmp_path, 0).save(STEP - 1, {"loss": 0.5, "rate": 0.1, "average": 0.5})
    kept = AttemptValues(tmp_path, 0)
    values = kept.restore(STEP, ("average", "best"), lambda: found, at_update)
    there = SimpleNamespace(**FIRST)
    object_reader.put(values.pop(OBJECTS)["self"], there)
    assert (there.losses, there.step) == ([1.0, 3.0], 1)
    assert str(values) == "{'rate': nan, 'average': 0.6, 'loss': 3.0, 'best': 3}"


def test_without_a_peer_that_has_completed_the_step_nothing_is_known(tmp_path: Path) -> None:
    assert peer_values.complete(tmp_path, STEP, {}, None, (), [1, 2]) is None
    AttemptValues(tmp_path, 0).save(STEP - 1, {"loss": 0.5, "best": 2})
    kept = AttemptValues(tmp_path, 0)
    assert str(kept.restore(STEP, ["best"])) == "{'loss': nan}"


def test_abandoned_attempt_of_a_peer_does_not_hide_the_one_before(tmp_path: Path) -> None:
    AttemptValues(tmp_path, 1, f"turn{STEP % 2}-values").save(STEP, {"best": 2})
    peer = AttemptValues(tmp_path, 1)
    peer.save(STEP, {"best": 3})
    peer.save(STEP + 1, {"best": 4})
    peer.take_back(STEP + 1)
    peer.take_back(STEP + 1)
    found = peer_values.complete(tmp_path, STEP, {"best": 2}, None, ["best"], [1])
    assert found is not None
    assert found.values["best"] == 3


def test_values_of_a_peer_are_used_and_named(tmp_path: Path, caplog: Any) -> None:
    AttemptValues(tmp_path, 0).save(STEP - 1, {"loss": 0.5, "best": 2})
    found = Completed(1, {"best": 3}, taken=["best"])
    values = AttemptValues(tmp_path, 0).restore(STEP, ["best"], lambda: found)
    assert str(values) == "{'loss': nan, 'best': 3}"
    assert "is now as in rank 1: best" in caplog.text
