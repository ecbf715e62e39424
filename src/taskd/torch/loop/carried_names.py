"""Which variables of a running function go from one round of a `for` loop to the next.

Such a variable is read in a round before that round sets it, so the round depends on the one
before: a running average, a hidden state, a batch that is fetched one step ahead. Or it is set in
some rounds only and read after the loop, such as the epoch with the best result. The compiled code
of the function says which ones these are.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from types import CodeType
from typing import TypeVar

T = TypeVar("T")

_END = {
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
}
"""The instruction after one of these is not the next one."""
_KINDS = ("FAST", "NAME", "DEREF", "GLOBAL")
_OTHER_READS = {"LOAD_CLOSURE", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def by_identity(most: int = 64) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As `lru_cache`, for functions of code, whose hash reads all of it and takes microseconds.

    `most`: so many answers are kept.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        known: dict[tuple[int, ...], tuple[CodeType, T]] = {}

        @wraps(function)
        def find(code: CodeType, *at: int) -> T:
            key = id(code), *at
            found = known.get(key)
            if found is None:
                if len(known) >= most:
                    known.clear()
                known[key] = found = code, function(code, *at)  # a new one cannot have the same id
            return found[1]

        return find

    return decorate


@by_identity(8)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """To read them takes milliseconds, and several questions are asked about each function."""
    return tuple(dis.get_instructions(code))


@by_identity(8)
def _flow(code: CodeType) -> _Flow:
    return _Flow(code)


@by_identity()
def of_loop(code: CodeType, at: int) -> tuple[str, ...]:
    """Of the loop whose `for`, or `next(…)` in a `while` loop, is the instruction at this offset.
    None, if there is no loop around it."""
    return tuple(name for name in _flow(code).carried(at) if "." not in name)


@by_identity()
def of_last_round(code: CodeType, at: int) -> tuple[str, ...]:
    """What rounds of the loop whose `for` is the instruction at this offset set, and what the code
    after the loop reads."""
    return tuple(name for name in _flow(code).left(at) if "." not in name)


@by_identity()
def has_with(code: CodeType, at: int) -> bool:
    """Whether the loop whose `for` is the instruction at this offset has a `with` block."""
    return _flow(code).has_with(at)


@by_identity()
def of_innermost_loop(code: CodeType, at: int) -> tuple[str, ...]:
    """Of the smallest loop around the instruction at this offset."""
    return tuple(name for name in _innermost(code, at) if "." not in name)


@by_identity()
def attributes_of_innermost_loop(code: CodeType, at: int) -> tuple[tuple[str, str], ...]:
    """The same for attributes of variables, such as `self.average`: the variable, the attribute."""
    dotted = (name.partition(".") for name in _innermost(code, at) if "." in name)
    return tuple((variable, attribute) for variable, _, attribute in dotted)


def _innermost(code: CodeType, at: int) -> tuple[str, ...]:
    flow = _flow(code)
    around = [rounds for start in flow.loops() if at in (rounds := flow.round_of(start))]
    return flow.carried_in(min(around, key=len)) if around else ()


@by_identity()
def set_in_rest(code: CodeType, begin: int, at: int) -> frozenset[str]:
    """What may still be set in this round of the smallest loop around `begin`, from `at` on."""
    return _flow(code).set_in_rest(begin, at)


@by_identity()
def of_function(code: CodeType) -> tuple[str, ...]:
    """Variables outside of the function that go from one call of it to the next."""
    flow = _flow(code)
    return tuple(name for name in flow.carried_in(flow.offsets()) if name in flow.outer(code))


@dataclass(frozen=True, slots=True)
class Uses:
    """What one round of a loop does with variables."""

    read: frozenset[str]
    fresh: frozenset[str]
    """Set in each round before they are read: what they were before does not matter."""
    set_outside: frozenset[str]
    """Variables that it sets as global ones, or that functions inside of it set."""


@by_identity()
def uses_of_loop(code: CodeType, at: int) -> Uses:
    """Of the loop whose `for` is the instruction at this offset."""
    return _flow(code).uses(at)


@by_identity(256)
def globals_of(code: CodeType) -> frozenset[str]:
    """The global variables that a function, or one inside of it, reads."""
    return _named(code, "LOAD_GLOBAL", "LOAD_NAME")


@by_identity(256)
def set_outside(code: CodeType) -> frozenset[str]:
    """The variables around a function that it, or one inside of it, sets."""
    outer = _named(code, "STORE_DEREF") & frozenset(code.co_freevars)
    return outer | _named(code, "STORE_GLOBAL")


@by_identity(1024)
def globals_set(code: CodeType) -> frozenset[str]:
    """The global variables that a function, or one inside of it, sets."""
    return _named(code, "STORE_GLOBAL")


@by_identity(1024)
def names_used(code: CodeType) -> frozenset[str]:
    """The global variables and attributes that a function, or one inside of it, uses."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*map(names_used, inner))


@by_identity(1024)
def attributes_set(code: CodeType) -> frozenset[str]:
    """The attributes, of whatever object, that a function, or one inside of it, sets."""
    return _named(code, "STORE_ATTR")


def learn(code: CodeType) -> None:
    """Find the answers about the loops with a `with` block in a script before they are needed."""
    flow = _flow(code)
    for at in filter(flow.has_with, flow.loops()):
        for ask in (of_loop, of_last_round, has_with, uses_of_loop):
            ask(code, at)
        for inside in flow.starts_of_with(at):
            of_innermost_loop(code, inside)
            attributes_of_innermost_loop(code, inside)
    for ask_about in (globals_of, globals_set, set_outside, names_used, attributes_set):
        ask_about(code)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            learn(one)


def _named(code: CodeType, *operations: str) -> frozenset[str]:
    found = {one.argval for one in dis.get_instructions(code) if one.opname in operations}
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(found).union(*(_named(one, *operations) for one in inner))


class _Flow:
    """Which instruction follows which, in one function.

    Every `for` loop is taken to have at least one round, and a `with` block not to end by an
    exception: otherwise almost every variable could be one from the round before.
    """

    def __init__(self, code: CodeType) -> None:
        self._all = instructions(code)
        self._place = {one.offset: place for place, one in enumerate(self._all)}
        self._next: dict[int, set[int]] = {one.offset: set() for one in self._all}
        self._reads: dict[int, set[str]] = {}
        self._writes: dict[int, set[str]] = {}
        for place, one in enumerate(self._all):
            self._reads[one.offset], self._writes[one.offset] = _variables(one)
            if one.opname in ("LOAD_ATTR", "STORE_ATTR") and (base := self._base(place)):
                uses = self._reads if one.opname == "LOAD_ATTR" else self._writes
                uses[one.offset].add(f"{base}.{one.argval}")
            if one.opname not in _END and place + 1 < len(self._all):
                self._next[one.offset].add(self._all[self._after(place)].offset)
            if one.opcode in _JUMPS and one.argval in self._place:
                self._next[one.offset].add(one.argval)
        for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
            handler = self._place.get(entry.target)
            if handler is None or self._is_with(handler):
                continue
            for one in self._all:
                if entry.start <= one.offset < entry.end:
                    self._next[one.offset].add(entry.target)

    def _base(self, place: int) -> str:
        """The variable whose attribute this instruction reads or sets. Empty: a longer expression.

        In `a.b += …` the variable is read together with the old value.
        """
        one, before = self._all[place], self._skip_back(place - 1)
        if self._all[before].opname == "COPY":
            before = self._skip_back(before - 1)
        if self._all[before].opname == "SWAP":
            while before > 0 and (self._all[before].opname, self._all[before].argval) != (
                "LOAD_ATTR",
                one.argval,
            ):
                before -= 1
            return self._base(before) if before > 0 else ""
        names, _ = _variables(self._all[before])
        return next(iter(names)) if len(names) == 1 else ""

    def _skip_back(self, place: int) -> int:
        while place > 0 and self._all[place].opname == "EXTENDED_ARG":
            place -= 1
        return place

    def _after(self, place: int) -> int:
        """The place of the next instruction, or of the first one of the loop that begins here."""
        start = place + 1
        if self._all[place].opname != "GET_ITER":
            return start
        while self._all[start].opname == "EXTENDED_ARG":
            start += 1
        return start + 1 if self._all[start].opname == "FOR_ITER" else place + 1

    def _is_with(self, place: int) -> bool:
        """Whether the handler is that of a `with` block, or of one of these handlers."""
        names = [one.opname for one in self._all[place : place + 3]]
        return "WITH_EXCEPT_START" in names or names[:1] != ["PUSH_EXC_INFO"]

    def offsets(self) -> tuple[int, ...]:
        return tuple(self._next)

    def outer(self, code: CodeType) -> set[str]:
        """The variables that belong to the module or to an outer function, and are set here."""
        stored = {one.argval for one in self._all if one.opname == "STORE_GLOBAL"}
        return stored | set(code.co_freevars)

    def loops(self) -> Iterator[int]:
        return (one.offset for one in self._all if one.opname == "FOR_ITER")

    def carried(self, at: int) -> tuple[str, ...]:
        return self.carried_in(self._round_at(at))

    def has_with(self, at: int) -> bool:
        return any(True for _ in self.starts_of_with(at))

    def starts_of_with(self, at: int) -> Iterator[int]:
        """Where the `with` blocks in one round of a loop begin."""
        ones = (self._all[self._place[offset]] for offset in self._round_at(at))
        return (one.offset for one in ones if one.opname in ("BEFORE_WITH", "LOAD_SPECIAL"))

    def _round_at(self, at: int) -> tuple[int, ...]:
        return self.round_of(self._offset_at(at))

    def _offset_at(self, at: int) -> int:
        """A specialized instruction may name a place inside of itself."""
        return max(one.offset for one in self._all if one.offset <= at)

    def round_of(self, at: int) -> tuple[int, ...]:
        """The instructions of one round, in order: they come after the `for` and lead back to it.

        The first one is that after the `for`. In a `while` loop, this is the call of `next`.
        """
        first = self._all[self._place[at] + 1].offset
        forward, todo = {first}, [first]
        while todo:
            for after in self._next[todo.pop()] - forward - {at}:
                forward.add(after)
                todo.append(after)
        before: dict[int, set[int]] = {offset: set() for offset in self._next}
        for offset, following in self._next.items():
            for after in following:
                before[after].add(offset)
        back, todo = {at}, [at]
        while todo:
            for earlier in before[todo.pop()] - back:
                back.add(earlier)
                todo.append(earlier)
        return tuple(sorted(forward & back, key=lambda offset: (offset != first, offset)))

    def uses(self, at: int) -> Uses:
        offsets = self._round_at(at)
        read = set[str]().union(*(self._reads[offset] for offset in offsets))
        written = set[str]().union(*(self._writes[offset] for offset in offsets))
        carried, outside = set(self.carried_in(offsets)), set[str]()
        for one in (self._all[self._place[offset]] for offset in offsets):
            if one.opname == "STORE_GLOBAL":
                outside.add(one.argval)
            if isinstance(one.argval, CodeType):
                read |= globals_of(one.argval)
                outside |= _named(one.argval, "STORE_GLOBAL", "STORE_DEREF")
        names = (name for name in read if "." not in name)
        return Uses(frozenset(names), frozenset(written - carried - outside), frozenset(outside))

    def set_in_rest(self, begin: int, at: int) -> frozenset[str]:
        around = [rounds for start in self.loops() if begin in (rounds := self.round_of(start))]
        inside = {*min(around, key=len)} if around else {*self._next}
        reached, todo = set[int](), [self._offset_at(at)]
        while todo:
            for after in self._next[todo.pop()] & inside - reached:
                reached.add(after)
                todo.append(after)
        return frozenset(name for offset in reached for name in self._writes[offset])

    def left(self, at: int) -> tuple[str, ...]:
        offsets = self._round_at(at)
        if not offsets:
            return ()
        leaving = self._next[self._offset_at(at)] - {offsets[0]}
        read = set[str]().union(*(self._live[offset] for offset in leaving))
        written = set[str]().union(*(self._writes[offset] for offset in offsets))
        return tuple(sorted(read & written))

    def _starts(self, offset: int, first: int) -> bool:
        """Whether this is the `for` of the loop whose rounds begin with that instruction."""
        place = self._place[offset]
        is_loop = self._all[place].opname == "FOR_ITER"
        return is_loop and self._all[place + 1].offset == first

    def carried_in(self, offsets: tuple[int, ...]) -> tuple[str, ...]:
        """What may be read in these instructions, or after them, before they set it, and is set by
        them."""
        if not offsets:
            return ()
        inside = frozenset(offsets)
        leaving = {one for offset in offsets for one in self._next[offset]} - inside
        after = {one: self._live_after(one, offsets[0]) for one in leaving}
        live = self._live_in(offsets, after)
        written = set[str]().union(*(self._writes[offset] for offset in offsets))
        return tuple(sorted(live[offsets[0]] & written))

    def _live_after(self, offset: int, first: int) -> set[str]:
        """What is read when a loop, whose first instruction is given, is left to this one."""
        one = self._all[self._place[offset]]
        if one.opname == "PUSH_EXC_INFO":  # an exception can come before anything is set
            return set()
        is_next_round = self._starts(offset, first)
        return self._live[one.argval if is_next_round else offset]

    @cached_property
    def _live(self) -> dict[int, set[str]]:
        """What may be read, from each instruction of the function on, before it is set."""
        return self._live_in(self.offsets(), {})

    def _live_in(self, offsets: tuple[int, ...], after: dict[int, set[str]]) -> dict[int, set[str]]:
        """The same for some of them. `after`: what is read where they are left to."""
        live: dict[int, set[str]] = {offset: set() for offset in offsets} | after
        has_changed = True
        while has_changed:
            has_changed = False
            for offset in reversed(offsets):
                later = set[str]().union(*(live.get(one, ()) for one in self._next[offset]))
                now = self._reads[offset] | (later - self._writes[offset])
                if now != live[offset]:
                    live[offset], has_changed = now, True
        return live


def _variables(one: dis.Instruction) -> tuple[set[str], set[str]]:
    """What the instruction reads, and what it sets."""
    kind, _, rest = one.opname.partition("_")
    values = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    names = [name for name in values if isinstance(name, str)]
    if one.opname in _OTHER_READS:
        return set(names), set()
    if not rest.startswith(_KINDS) or rest == "FAST_AND_CLEAR" or not names:
        return set(), set()
    match kind:
        case "LOAD":
            return set(names), set()
        case "STORE" if rest.endswith("LOAD_FAST"):
            return set(names[1:]) - set(names[:1]), set(names[:1])
        case "STORE" | "DELETE":
            return set(), set(names)
        case _:
            return set(), set()
