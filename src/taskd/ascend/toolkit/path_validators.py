"""Validators of files and directories, for paths that come from outside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from taskd.ascend.toolkit.value_validators import StringValidator, Validator

MAX_FILE_SIZE = 1024 * 1024
MAX_ENTRIES = 4096
BLACKLIST = ("/usr/bin", "/usr/sbin", "/etc", "/usr/lib", "/usr/lib64")
SENSITIVE_WORDS = ("Key", "password", "privatekey")


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
            lambda value: os.path.realpath(value) == value, "path is, or passes, a symbolic link"
        )

    def check_user_group(self) -> Self:
        return self.register_checker(_is_ours, "file belongs to neither this user nor this group")


class DirectoryValidator(StringValidator):
    def __init__(self, value: Any, max_len: int | None = None, min_len: int = 1) -> None:
        super().__init__(value, max_len, min_len)

    @staticmethod
    def remove_prefix(text: str, prefix: str) -> str:
        return text.removeprefix(prefix)

    @staticmethod
    def check_is_children_path(parent: str, child: str) -> bool:
        """Whether the second path is the first one or lies below it, links followed."""
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
            "path is, or passes, a symbolic link",
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
        """Refuse these paths or, if `exact_compare` is off, also all that lies below them."""
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
