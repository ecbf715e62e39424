"""What an attempt has left in the script's variables, kept for the replacement of this rank.

A replacement can be handed a step that its predecessor has committed, to run the code after it.
That code uses variables which the attempt has set, such as the loss. So when an attempt ends, the
variables that it has set and that are read elsewhere in the same function are saved in the node's
shared memory, as far as they are small. A value that was lost with the process is replaced by NaN:
it is not known, and the code after the step must not fail.
"""

from __future__ import annotations

import inspect
import logging
import math
import mmap
import os
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from taskd.torch.loop import carried_names, frame_locals
from taskd.torch.startup.setup_results import SavedTensor
from taskd.torch.state.sealed import BadState, seal, seal_pickled, unseal

log = logging.getLogger(__name__)

RESULT = "return"
"""The name for what a function has returned: no variable has it."""
OBJECTS = "objects of the loop"
"""The name for what `loop_objects.py` has written down. It is kept as it is."""
AT_UPDATE = "update-values"
"""The name of the file with the values before the first update."""
PLACE = "values of an attempt"
NEVER = -1
"""No step."""
SIZE = 1 << 20
"""Only what is written takes memory."""
_HEAD = struct.Struct("<QQ")
"""The step plus one (0: not valid, written last), and the length of what follows."""
_FIRST_WORD = struct.Struct("<Q")
_RESERVED = 4096
"""For the seal, and for what pickle puts around the values."""
MAX_ELEMENTS, MAX_ITEMS = 1024, 64
"""Of a tensor, and of a list or dictionary: a larger one is not kept."""

Values = dict[str, Any]
_NOTHING: Values = {OBJECTS: {}}
_PICKLED_NOTHING = pickle.dumps(_NOTHING)


class AttemptValues:
    """The values of the last attempt of this rank."""

    def __init__(self, folder: Path | None, rank: int, name: str = "values") -> None:
        """`folder` is in the node's shared memory; None: nothing is kept."""
        path = None if folder is None else folder / f"{name}-{rank}"
        self._rank, self._named = rank, set[str]()
        self._last: tuple[int, Values] | None = None if path is None else _read_own(path, rank)
        self._map = None if path is None else _open(path)
        self._before: tuple[int, Values] | None = None

    def save(self, step: int, values: Values) -> None:
        """An attempt at this step is complete on this rank."""
        if self._map is None:
            return
        objects = {OBJECTS: values[OBJECTS]} if OBJECTS in values else {}
        variables = ((name, _small(value)) for name, value in values.items() if name != OBJECTS)
        kept = {name: small for name, small in variables if small != _SKIP} | objects
        self._before = self._last
        self._write(step, kept)

    def take_back(self, step: int) -> None:
        """The attempt at this step was abandoned after its end: a peer may need what was before."""
        if self._last is not None and self._last[0] == step and self._before is not None:
            self._write(*self._before)

    def _write(self, step: int, kept: Values) -> None:
        assert self._map is not None
        self._last = step, kept
        place = _place(self._rank, step)
        data = seal_pickled(_PICKLED_NOTHING, place) if kept == _NOTHING else seal(kept, place)
        if len(data) > SIZE - _HEAD.size:
            kept = self._without_largest(kept)
            self._last, data = (step, kept), seal(kept, place)
        _FIRST_WORD.pack_into(self._map, 0, 0)
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _FIRST_WORD.pack_into(self._map, _FIRST_WORD.size, len(data))
        _FIRST_WORD.pack_into(self._map, 0, step + 1)

    def _without_largest(self, kept: Values) -> Values:
        """As much as there is room for, beginning with what is small."""
        variables = {(name,): value for name, value in kept.items() if name != OBJECTS}
        objects = {(OBJECTS, name): value for name, value in kept.get(OBJECTS, {}).items()}
        sizes = {at: len(pickle.dumps(one)) for at, one in (variables | objects).items()}
        left, fitting = SIZE - _RESERVED, Values()
        if objects:
            fitting[OBJECTS] = {}
        for at in sorted(sizes, key=lambda at: sizes[at]):
            left -= sizes[at] + len(at[-1].encode()) + _HEAD.size
            if left >= 0:
                space = fitting[OBJECTS] if len(at) > 1 else fitting
                space[at[-1]] = (variables | objects)[at]
            elif at[-1] not in self._named:
                self._named.add(at[-1])
                log.warning(
                    "%s is too large to be kept (%d bytes): a replacement would not begin with "
                    "what it was in the lost process. If anything depends on it, give an object "
                    "with state_dict and load_state_dict to protect()",
                    at[-1],
                    sizes[at],
                )
        return fitting

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        self._last = None
        if self._map is not None:
            _FIRST_WORD.pack_into(self._map, 0, 0)

    @property
    def can_restore(self) -> bool:
        """Whether it is known which values an attempt leaves."""
        return self._last is not None

    def of_step(self, step: int) -> Values | None:
        """The last values, if they are those of this step."""
        if self._last is None or self._last[0] != step:
            return None
        return _read_all(self._last[1], is_known=True)

    def kept_at(self, step: int) -> Values | None:
        """The same, in the form in which they are kept."""
        return self._last[1] if self._last is not None and self._last[0] == step else None

    def restore(
        self,
        step: int,
        carried: Collection[str] = (),
        from_peer: Callable[[], Completed | None] = lambda: None,
        at_update: Values | None = None,
    ) -> Values:
        """The last values, if they are those after this step; or NaN in place of each number.

        `carried`: the next step depends on these. If they are not known, `from_peer` may know them;
        otherwise they stay what they are. `at_update`: the values before the step's first update,
        as far as the rest of the attempt does not change them.
        """
        at, values = self._last or (NEVER, {})
        if at == step:
            return _read_all(values, is_known=True)
        found, known = from_peer(), at_update or {}
        missing = values.keys() - {*carried} - known.keys()
        left = {name: value for name, value in values.items() if name in missing}
        if found is None:
            both = values | known
            old = sorted({*both.get(OBJECTS, {}), *both.keys() & {*carried}})
            found = Completed(self._rank, unknown=old)
        if (lost := sorted(missing - {OBJECTS})) or found.unknown or found.taken:
            log.warning(
                "what the attempt at step %d has computed on this rank after %s is lost. %s",
                step,
                "its last exchange with the others" if at_update is None else "its update began",
                found.sentences("step" if at_update is None else "update", lost),
            )
        old_values = _read_all(left, is_known=False) | _read_all(known, is_known=True)
        return old_values | _read_all(found.values, is_known=True)


@dataclass
class Completed:
    """What an attempt that was lost would have left, as far as another rank shows it."""

    peer: int
    values: Values = field(default_factory=dict)
    """The carried variables and the objects."""
    taken: list[str] = field(default_factory=list)
    """What has the peer's content now."""
    unknown: list[str] = field(default_factory=list)
    """What has changed in the peer, and perhaps in another way in this rank."""

    def sentences(self, since: str, lost: Collection[str]) -> str:
        parts = []
        if lost:
            parts.append(f"NaN in the code after it: {', '.join(lost).replace(RESULT, 'result')}.")
        if self.taken:
            parts.append(f"Was equal, and is now as in rank {self.peer}: {', '.join(self.taken)}.")
        if self.unknown:
            parts.append(
                f"As before the {since}: {', '.join(self.unknown)}. If the training depends on "
                "them, give them to protect()"
            )
        return " ".join(parts)


def _read_all(values: Values, is_known: bool) -> Values:
    """Objects whose content is not known keep the one they have."""
    variables = {name: value for name, value in values.items() if name != OBJECTS}
    objects = {OBJECTS: values[OBJECTS]} if is_known and OBJECTS in values else {}
    return {name: large(value, is_known) for name, value in variables.items()} | objects


class _Device:
    """A small tensor on a device: reading it in each step would make the step wait."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


class _Scalar:
    """A tensor with one element, such as a loss: nearly all values are of this kind."""

    __slots__ = ("dtype", "item", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, item: Any) -> None:
        self.shape, self.dtype, self.item = shape, dtype, item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scalar) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __reduce__(self) -> tuple[type[_Scalar], tuple[Any, ...]]:
        return _Scalar, (self.shape, self.dtype, self.item)


_SKIP = "taskd: this value is not kept"


@dataclass(frozen=True, slots=True)
class Record:
    """A named tuple."""

    items: list[Any]
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Member:
    """One of an enumeration of the script."""

    module: str
    name: str
    member: str


def find_class(module: str, name: str) -> Any:
    """The class of this name in this process. None: there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _small(value: Any) -> Any:
    type_ = type(value)
    match value:
        case torch.Tensor():
            return small_tensor(value)
        case Enum():
            name = type_.__module__, type_.__qualname__
            return Member(*name, value.name) if find_class(*name) is type_ else _SKIP
        case None | bool():
            return value
        case str() | bytes() | int() | float():
            plain: Any = next(one for one in _PLAIN_VALUES if isinstance(value, one))
            return value if type_ is plain else plain(value)
        case list() | tuple():
            return _small_list(value)
        case dict() if len(value) <= MAX_ITEMS and all(map(_is_key, value)):
            small = _small_list([*value.values()])
            return _SKIP if small == _SKIP else _like(value, zip(value, small, strict=True))
        case _:
            return _SKIP


def _small_list(value: list[Any] | tuple[Any, ...]) -> Any:
    if len(value) > MAX_ITEMS:
        return _SKIP
    items, type_ = [_small(item) for item in value], type(value)
    if _SKIP in items:
        return _SKIP
    name = type_.__module__, type_.__qualname__
    if hasattr(type_, "_fields") and find_class(*name) is type_:
        return Record(items, *name)
    return items if isinstance(value, list) else tuple(items)


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_key, key)))


def _like(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dictionary of the same kind, if every process knows it."""
    if isinstance(value, defaultdict) and value.default_factory in _FACTORIES:
        return defaultdict(value.default_factory, items)
    return type(value)(items) if type(value) in (OrderedDict, Counter) else dict(items)


_PLAIN_VALUES = (str, bytes, int, float)
_KEYS = (type(None), bool, int, float, str, bytes)
_FACTORIES = (None, int, float, str, bool, list, dict, set)


def small_tensor(value: torch.Tensor) -> Any:
    """The tensor in a form for another process."""
    if value.numel() > MAX_ELEMENTS or value.layout != torch.strided or type(value) not in _PLAIN:
        return _SKIP
    if value.device.type != "cpu":
        return _Device(tuple(value.shape), value.dtype, str(value.device))
    if value.numel() == 1 and value.dtype in _EXACT:
        return _Scalar(tuple(value.shape), value.dtype, value.item())
    return SavedTensor.of(value.detach().contiguous())


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_EXACT = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
)
"""Types whose values Python's own numbers hold exactly."""


def large(value: Any, is_known: bool) -> Any:
    """What was made small, or something of the same form that is not a number."""
    match value:
        case _Device():
            return _unknown(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        case _Scalar():
            tensor = torch.full(value.shape, value.item, dtype=value.dtype)
            return tensor if is_known else _unknown(tensor)
        case SavedTensor():
            tensor = torch.empty(value.shape, dtype=value.dtype)
            value.copy_to(tensor)
            return tensor if is_known else _unknown(tensor)
        case Record():
            items = [large(item, is_known) for item in value.items]
            class_ = find_class(value.module, value.name)
            return tuple(items) if class_ is None else tuple.__new__(class_, items)
        case Member():
            class_ = find_class(value.module, value.name)
            return None if class_ is None else class_[value.member]
        case list() | tuple():
            return type(value)(large(item, is_known) for item in value)
        case dict():
            return _like(value, [(key, large(item, is_known)) for key, item in value.items()])
        case float() if not is_known:
            return math.nan
        case _:
            return value


def _unknown(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.zero_()


# The script's variables


def calling_frame() -> FrameType:
    """The one from which our caller was called."""
    ours = inspect.currentframe()
    assert ours is not None
    assert ours.f_back is not None
    assert ours.f_back.f_back is not None
    return ours.f_back.f_back


def set_since(begin: int, frame: FrameType) -> Values:
    """The variables that were set since this instruction and are read elsewhere in the function,
    or in the next step."""
    names = _names(frame.f_code, begin, frame.f_lasti)
    if not names:
        return {}
    present = frame_locals.read(frame)
    return {name: present[name] for name in names if name in present}


def set_by_update(begin: int, frame: FrameType) -> Values:
    """The same, without those that the rest of the attempt sets again. An update begins."""
    later = carried_names.set_in_rest(frame.f_code, begin, frame.f_lasti)
    return {name: one for name, one in set_since(begin, frame).items() if name not in later}


def put_into(frame: FrameType, values: Values) -> None:
    """Set variables of a running function."""
    named = {name: value for name, value in values.items() if name not in (RESULT, OBJECTS)}
    frame_locals.put(frame, named)


@carried_names.by_identity()
def _names(code: CodeType, begin: int, end: int) -> tuple[str, ...]:
    inside, outside = set[str](), set[str]()
    for one in carried_names.instructions(code):
        is_inside = begin < one.offset < end
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if one.opname.startswith("STORE_") and one.opname not in _NOT_VARIABLES and is_inside:
            inside.update(name for name in names if isinstance(name, str))
        elif one.opname.startswith("LOAD_") and one.opname not in _NOT_VARIABLES and not is_inside:
            outside.update(name for name in names if isinstance(name, str))
    outside.update(carried_names.of_innermost_loop(code, begin))
    return tuple(sorted(inside & outside))


_NOT_VARIABLES = {"STORE_ATTR", "STORE_SUBSCR", "LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST"}


# The file


def _place(rank: int, step: int) -> str:
    return f"{PLACE} of rank {rank} at step {step}"


def read_kept(path: Path, rank: int, step: int) -> Values | None:
    """What a peer on this node has kept. None: not of this step, or not yet."""
    try:
        found = _read(path, rank)
    except BadState:  # it is being written
        return None
    return found[1] if found is not None and found[0] == step else None


def _read_own(path: Path, rank: int) -> tuple[int, Values] | None:
    try:
        return _read(path, rank)
    except BadState as error:
        log.warning("cannot read what the predecessor has computed: %s", error)
        return None


def _read(path: Path, rank: int) -> tuple[int, Values] | None:
    """Raises BadState."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _HEAD.size:
        return None
    step, length = _HEAD.unpack_from(data)
    if not step:
        return None
    sealed = data[_HEAD.size : _HEAD.size + length]
    return step - 1, unseal(sealed, _place(rank, step - 1))


def _open(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, SIZE)
        return mmap.mmap(file, SIZE)
    finally:
        os.close(file)
