"""Checks of values from outside: `IntValidator(x, 0, 9).check_value().is_valid()`.

Chained validators of values, files and directories, and two helpers without exceptions: one for
addresses, one for small files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Self

from taskd.ascend.documented.run_log import run_log
from taskd.runtime.files import private_files as files

Check = Callable[[Any], object]

MAX_RANK = 4095
MAX_DEVICES = 4096
MAX_FILE_SIZE = 1024 * 1024
MAX_ENTRIES = 4096
BLACKLIST = ("/usr/bin", "/usr/sbin", "/etc", "/usr/lib", "/usr/lib64")
SENSITIVE_WORDS = ("Key", "password", "privatekey")


class Validator:
    """A value and its checks, which run in the order in which they were added."""

    def __init__(self, value: Any, msg: str = "value is invalid") -> None:
        self.value = value
        self.msg: str | None = msg
        self.checkers: list[tuple[Check, str]] = []
        self.is_valid_state: bool | None = None

    def register_checker(self, checker: Check, msg: str | None = None) -> Self:
        """Add a check. It fails if its result is false or if it raises."""
        self.checkers.append((checker, msg or self.msg or "value is invalid"))
        self.is_valid_state = None
        return self

    def check(self) -> Self:
        """Run the checks up to the first that fails. `msg` is its message, or None."""
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
            # Not `isdigit`: it accepts characters, such as superscripts, that `int` rejects.
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
    # A bool is an int in Python, but not a valid rank or size.
    return isinstance(value, int) and not isinstance(value, bool)


class FileValidator(Validator):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.register_checker(lambda value: isinstance(value, str), "value is not a string")
        self.register_checker(os.path.isfile, "value is not a file")

    def check_file_size(self, max_size: int = MAX_FILE_SIZE, min_size: int = 0) -> Self:
        return self.register_checker(
            lambda value: min_size < os.path.getsize(value) <= max_size, "file size is out of range"
        )

    def check_not_soft_link(self) -> Self:
        return self.register_checker(
            lambda value: os.path.realpath(value) == value, "path is or contains a symbolic link"
        )

    def check_user_group(self) -> Self:
        return self.register_checker(_is_ours, "file belongs to neither this user nor this group")


class DirectoryValidator(StringValidator):
    def __init__(self, value: Any, max_len: int | None = None, min_len: int = 1) -> None:
        super().__init__(value, max_len, min_len)

    @staticmethod
    def remove_prefix(text: str | None, prefix: str | None) -> tuple[bool, str | None]:
        """Whether the text begins with the prefix, and what follows it; otherwise the text."""
        if text is None or prefix is None or not text.startswith(prefix):
            return False, text
        return True, text.removeprefix(prefix)

    @staticmethod
    def check_is_children_path(parent: str, child: str) -> bool:
        """Whether `child` is `parent` or is located below it, after resolving links."""
        if not child or parent is None:
            return False
        return Path(os.path.realpath(child)).is_relative_to(os.path.realpath(parent))

    def check_is_not_none(self) -> Self:
        return self.register_checker(lambda value: bool(value), "path is empty")

    def check_dir_name(self) -> Self:
        self.check_string_length()
        return self.register_checker(lambda value: ".." not in value, "path contains '..'")

    def check_directory_permissions(self, mode: int) -> Self:
        return self.register_checker(
            lambda value: stat.S_IMODE(os.stat(value).st_mode) & 0o777 == mode,
            f"mode of the directory is not {mode:o}",
        )

    def check_not_soft_link(self) -> Self:
        return self.register_checker(
            lambda value: os.path.realpath(value) == os.path.abspath(value),
            "path is or contains a symbolic link",
        )

    def check_dir_file_number(self) -> Self:
        return self.register_checker(
            lambda value: len(os.listdir(value)) <= MAX_ENTRIES, "directory holds too many entries"
        )

    def path_should_exist(self, is_file: bool = True, msg: str | None = None) -> Self:
        return self.register_checker(
            os.path.isfile if is_file else os.path.exists, msg or "path does not exist"
        )

    def path_should_not_exist(self) -> Self:
        return self.register_checker(lambda value: not os.path.lexists(value), "path exists")

    def with_blacklist(
        self, lst: Iterable[str] | None = None, exact_compare: bool = True, msg: str | None = None
    ) -> Self:
        """Refuse these paths and, if `exact_compare` is off, all paths below them."""
        forbidden = tuple(BLACKLIST if lst is None else lst)

        def allowed(value: str) -> bool:
            if exact_compare:
                return os.path.normpath(value) not in forbidden
            return not any(self.check_is_children_path(each, value) for each in forbidden)

        return self.register_checker(allowed, msg or "path is on the blacklist")

    def should_not_contains_sensitive_words(
        self, words: Iterable[str] | None = None, msg: str | None = None
    ) -> Self:
        unwanted = tuple(SENSITIVE_WORDS if words is None else words)

        def harmless(value: str) -> bool:
            name = os.path.basename(value)
            return not name or not any(word in name for word in unwanted)

        return self.register_checker(harmless, msg or "path contains a sensitive word")

    def check_user_group(self) -> Self:
        return self.register_checker(_is_ours, "path belongs to neither this user nor this group")


def _is_ours(value: str) -> bool:
    owner = os.stat(value)
    return owner.st_uid == os.geteuid() or owner.st_gid == os.getegid()


def pre_handle_ip(address: str | None) -> tuple[str, Exception | None]:
    """The address ready for `host:port` (IPv6 in brackets), or an empty string and the error."""
    if not address:
        return "", ValueError("the address is empty")
    if not isinstance(address, str):
        return "", ValueError(f"the address must be a string, got {address!r}")
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        IPv4Address(bare)
    except AddressValueError:
        pass
    else:
        return bare, None
    try:
        IPv6Address(bare)
    except AddressValueError:
        return "", ValueError(f"{address!r} is neither an IPv4 nor an IPv6 address")
    return f"[{bare}]", None


def safe_get_file_info(path: str) -> str:
    """The text of a file. Empty if it is missing, a link, not a regular file or over 1 MiB."""
    try:
        return files.read_small(path).decode()
    except (OSError, TypeError, ValueError) as error:
        run_log.debug("%s is not read: %s", path, error)
        return ""
