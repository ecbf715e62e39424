"""Validators of plain values. Those of paths are next door, in `paths.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

Check = Callable[[Any], object]

MAX_RANK = 4095
MAX_DEVICES = 4096


class Validator:
    """A value and the checks that it has to pass, in the order in which they were added."""

    def __init__(self, value: Any, msg: str = "value is invalid") -> None:
        self.value = value
        self.msg: str | None = msg
        self.checkers: list[tuple[Check, str]] = []
        self.is_valid_state: bool | None = None

    def register_checker(self, checker: Check, msg: str | None = None) -> Self:
        """Add a check; it fails by answering something untrue or by raising."""
        self.checkers.append((checker, msg or self.msg or "value is invalid"))
        self.is_valid_state = None
        return self

    def check(self) -> Self:
        """Run the checks up to the first that fails: its message becomes `msg`, else None."""
        self.is_valid_state, failed = True, None
        for checker, message in self.checkers:
            if not _passes(checker, self.value):
                self.is_valid_state, failed = False, message
                break
        self.msg = failed
        return self

    def is_valid(self) -> bool:
        if self.is_valid_state is None:
            self.check()
        return self.is_valid_state is True

    def get_value(self, default: Any = None) -> Any:
        return self.value if self.is_valid() else default


def _passes(checker: Check, value: Any) -> bool:
    try:
        return bool(checker(value))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return False


class ClassValidator(Validator):
    def __init__(self, value: Any, classes: type | tuple[type, ...]) -> None:
        super().__init__(value)
        self.classes = classes

    def check_isinstance(self) -> Self:
        return self.register_checker(
            lambda value: isinstance(value, self.classes),
            f"value is not an instance of {self.classes}",
        )


class StringValidator(Validator):
    def __init__(self, value: Any, max_len: int | None = None, min_len: int = 0) -> None:
        super().__init__(value)
        self.max_len = max_len
        self.min_len = min_len
        self.register_checker(lambda value: isinstance(value, str), "value is not a string")

    def check_string_length(self) -> Self:
        def fits(value: str) -> bool:
            return len(value) >= self.min_len and (
                self.max_len is None or len(value) <= self.max_len
            )

        return self.register_checker(fits, "string length is out of range")

    def check_not_contain_black_element(self, element: str) -> Self:
        return self.register_checker(
            lambda value: element not in value, f"string contains the forbidden {element!r}"
        )

    def can_be_transformed2int(self, min_value: int = 0, max_value: int = MAX_RANK) -> Self:
        def is_number(value: str) -> bool:
            # `isdigit` takes digits of every script, some of which `int` does not.
            return value.isdecimal() and min_value <= int(value) <= max_value

        return self.register_checker(is_number, "string is not a number in range")


class IntValidator(Validator):
    def __init__(
        self, value: Any, min_value: int | None = None, max_value: int | None = None
    ) -> None:
        super().__init__(value)
        self.min_value = min_value
        self.max_value = max_value
        self.register_checker(_is_int, "value is not an integer")

    def check_value(self) -> Self:
        return self._check_range(self.min_value, self.max_value)

    def _check_range(self, low: int | None, high: int | None) -> Self:
        def fits(value: int) -> bool:
            return (low is None or value >= low) and (high is None or value <= high)

        return self.register_checker(fits, f"value is not within {low} and {high}")


class RankSizeValidator(IntValidator):
    def check_rank_size_valid(self) -> Self:
        return self._check_range(0, MAX_RANK)

    def check_device_num_valid(self) -> Self:
        return self._check_range(1, MAX_DEVICES)


class MapValidator(Validator):
    def __init__(self, value: Any, inclusive_keys: Iterable[Any] | None = None) -> None:
        super().__init__(value)
        self.inclusive_keys = list(inclusive_keys or ())
        self.register_checker(lambda value: isinstance(value, dict), "value is not a dict")
        for key in self.inclusive_keys:
            self.register_checker(_has(key), f"the key {key!r} is missing")


def _has(key: Any) -> Check:
    return lambda value: key in value


def _is_int(value: Any) -> bool:
    # A bool is an int to Python, but nobody means one by a rank or a size.
    return isinstance(value, int) and not isinstance(value, bool)
