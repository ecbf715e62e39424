"""What an attempt has left in a rank that was lost before its end, as far as a peer shows it.

A rank can be lost after its last exchange with the others, while the rest of its attempt runs: the
others complete the step, and what this rank has set in its variables and objects is lost, except
what it has kept when its update began. Much of the rest is the same in all ranks: the number of the
step, the learning rate, the best result so far. So what was equal in both ranks when the update (or
the step) began is taken from a peer on the same node that has completed the attempt. The rest stays
as it was then; both are named in a warning.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from taskd.torch.loop.attempt_values import AT_UPDATE, OBJECTS, Completed, Values, read_kept
from taskd.torch.loop.written_objects import MISSING, SAME, Attributes, Mapping, changed

WAIT_S, PAUSE_S = 3.0, 0.01
"""A peer may still be in the rest of its attempt."""


def complete(
    folder: Path,
    step: int,
    mine: Values,
    at_update: Values | None,
    carried: Collection[str],
    peers: Collection[int],
) -> Completed | None:
    """`mine`: what this rank had when the step began, and `at_update`, when its update began. None:
    no peer shows what followed."""
    near = [peer for peer in peers if (folder / f"values-{peer}").exists()]
    for _ in Tries(every(PAUSE_S), deadline=monotonic() + WAIT_S) if near else ():
        for peer in near:
            before = read_kept(folder / f"turn{step % 2}-values-{peer}", peer, step)
            if before is not None and at_update is not None:
                update = read_kept(folder / f"{AT_UPDATE}-{peer}", peer, step)
                before = None if update is None else before | update
            after = read_kept(folder / f"values-{peer}", peer, step)
            if before is not None and after is not None:
                mine |= at_update or {}
                return _completed(Completed(peer), mine, before, after, carried)
    return None


def _completed(
    found: Completed, mine: Values, before: Values, after: Values, carried: Collection[str]
) -> Completed:
    for name in sorted({*carried} & after.keys()):
        if _is_equal(before.get(name), after[name]):
            continue
        if name in mine and _is_equal(mine[name], before.get(name)):
            found.values[name] = after[name]
            found.taken.append(name)
        else:
            found.unknown.append(name)
    own, old, new = (one.get(OBJECTS, {}) for one in (mine, before, after))
    merged = {
        name: _merged(found, name, own.get(name, MISSING), old.get(name, MISSING), new[name])
        for name in sorted(new)
    }
    found.values[OBJECTS] = {name: one for name, one in merged.items() if one is not MISSING}
    return found


def _is_equal(first: Any, second: Any) -> bool:
    return pickle.dumps(first) == pickle.dumps(second)


def _merged(found: Completed, name: str, mine: Any, before: Any, after: Any) -> Any:
    """What has not changed since the first step is missing in all three."""
    if _is_same(before, after):
        return mine
    if _is_same(mine, before):
        found.taken.append(name)
        return after
    parts = mine, before, after
    if not isinstance(after, Attributes | Mapping) or any(
        one is not MISSING and type(one) is not type(after) for one in parts
    ):
        found.unknown.append(name)
        return mine
    own, old, new = ({} if one is MISSING else one.items for one in parts)
    items = {
        key: _merged(
            found, f"{name}.{key}", *(there.get(key, MISSING) for there in (own, old, new))
        )
        for key in [*own, *(key for key in new if key not in own)]
    }
    left = {key: item for key, item in items.items() if item is not MISSING}
    gone = frozenset() if mine is MISSING else mine.gone
    return replace(after if mine is MISSING else mine, items=left, gone=gone | after.gone)


def _is_same(first: Any, second: Any) -> bool:
    if first is MISSING or second is MISSING:
        return first is second
    return changed(first, second) is SAME
