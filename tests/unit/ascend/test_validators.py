"""Validators of values, files and directories, and the check of addresses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.python.utils.ip import pre_handle_ip
from taskd.python.utils.validator import (
    ClassValidator,
    DirectoryValidator,
    FileValidator,
    IntValidator,
    MapValidator,
    RankSizeValidator,
    StringValidator,
    Validator,
)


def test_checks_run_in_order_and_stop_at_the_first_that_fails() -> None:
    seen: list[str] = []

    def check(name: str, answer: bool) -> Callable[[Any], bool]:
        def remember(value: Any) -> bool:
            seen.append(f"{name} {value}")
            return answer

        return remember

    validator = (
        Validator(7)
        .register_checker(check("a", True), "not a")
        .register_checker(check("b", False), "not b")
        .register_checker(check("c", True), "not c")
    )
    assert not validator.is_valid()
    assert validator.msg == "not b"
    assert seen == ["a 7", "b 7"]
    assert validator.get_value("instead") == "instead"


def test_valid_value_has_no_message() -> None:
    validator = Validator(7).check()
    assert validator.is_valid()
    assert validator.msg is None
    assert validator.get_value() == 7


def test_check_that_raises_fails() -> None:
    assert not Validator(7).register_checker(lambda value: value["x"]).is_valid()


def test_check_added_later_counts() -> None:
    validator = IntValidator(5000)
    assert validator.is_valid()
    assert not validator.register_checker(lambda value: value < 100, "too big").is_valid()
    assert validator.msg == "too big"


def test_class_is_checked() -> None:
    assert ClassValidator([], list).check_isinstance().is_valid()
    assert ClassValidator([], (dict, list)).check_isinstance().is_valid()
    assert not ClassValidator((), list).check_isinstance().is_valid()


@pytest.mark.parametrize(
    ("value", "valid"), [("ab", True), ("a", False), ("abcd", False), (b"ab", False), (None, False)]
)
def test_string_length_is_checked(value: object, valid: bool) -> None:
    assert StringValidator(value, max_len=3, min_len=2).check_string_length().is_valid() is valid


def test_forbidden_part_of_a_string() -> None:
    assert StringValidator("a/b").check_not_contain_black_element("..").is_valid()
    assert not StringValidator("a/../b").check_not_contain_black_element("..").is_valid()


@pytest.mark.parametrize(
    ("value", "valid"),
    [("0", True), ("4095", True), ("4096", False), ("-1", False), ("", False), ("²", False)],
)
def test_string_must_be_a_number_in_range(value: str, valid: bool) -> None:
    assert StringValidator(value).can_be_transformed2int().is_valid() is valid


@pytest.mark.parametrize(
    ("value", "valid"),
    [(0, True), (9, True), (10, False), (-1, False), (True, False), ("1", False)],
)
def test_int_must_be_in_range(value: object, valid: bool) -> None:
    assert IntValidator(value, 0, 9).check_value().is_valid() is valid


def test_bool_is_not_an_int() -> None:
    assert not IntValidator(True).is_valid()
    assert not RankSizeValidator(True).check_device_num_valid().is_valid()


@given(st.integers())
def test_rank_and_device_ranges(value: int) -> None:
    assert RankSizeValidator(value).check_rank_size_valid().is_valid() is (0 <= value <= 4095)
    assert RankSizeValidator(value).check_device_num_valid().is_valid() is (1 <= value <= 4096)


def test_later_rank_size_check_keeps_earlier_checks() -> None:
    validator = RankSizeValidator(0, 5, 10).check_value().check_rank_size_valid()
    assert not validator.is_valid()
    both = RankSizeValidator(4096).check_rank_size_valid().check_device_num_valid()
    assert not both.is_valid()


@given(st.dictionaries(st.sampled_from("abcd"), st.integers()), st.lists(st.sampled_from("abcd")))
def test_map_must_have_all_keys(value: dict[str, int], keys: list[str]) -> None:
    assert MapValidator(value, keys).is_valid() is all(key in value for key in keys)


def test_first_missing_key_is_named() -> None:
    validator = MapValidator({"last": 1}, ["first", "last"]).check()
    assert validator.msg == "the key 'first' is missing"
    assert not MapValidator([("first", 1)], ["first"]).is_valid()


def test_file_checks(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    link = tmp_path / "link"
    link.symlink_to(file)
    valid = FileValidator(str(file)).check_file_size().check_not_soft_link().check_user_group()
    assert valid.is_valid()
    assert not FileValidator(str(tmp_path)).is_valid()
    assert not FileValidator(str(tmp_path / "absent")).is_valid()
    assert not FileValidator(3).is_valid()
    assert not FileValidator(str(link)).check_not_soft_link().is_valid()
    assert not FileValidator(str(file)).check_file_size(9).is_valid()
    assert not FileValidator(str(file)).check_file_size(20, 10).is_valid()


def test_empty_file_fails_the_size_check(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert not FileValidator(str(tmp_path / "empty")).check_file_size().is_valid()


def test_directory_checks(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o750)
    link = tmp_path / "link"
    link.symlink_to(place)
    valid = (
        DirectoryValidator(str(place), max_len=1024)
        .check_is_not_none()
        .check_dir_name()
        .check_not_soft_link()
        .check_directory_permissions(0o750)
        .check_dir_file_number()
        .path_should_exist(is_file=False)
        .with_blacklist()
        .should_not_contains_sensitive_words()
        .check_user_group()
    )
    assert valid.is_valid(), valid.msg
    assert not DirectoryValidator(str(place)).check_directory_permissions(0o755).is_valid()
    assert not DirectoryValidator(str(link)).check_not_soft_link().is_valid()
    assert not DirectoryValidator("").check_dir_name().is_valid()
    assert not DirectoryValidator("/a/../b").check_dir_name().is_valid()
    assert not DirectoryValidator(str(place)).path_should_exist(is_file=True).is_valid()


def test_path_should_not_exist(tmp_path: Path) -> None:
    assert DirectoryValidator(str(tmp_path / "absent")).path_should_not_exist().is_valid()
    validator = DirectoryValidator(str(tmp_path)).path_should_not_exist().check()
    assert validator.msg == "path exists"


def test_blacklisted_paths_are_refused() -> None:
    assert not DirectoryValidator("/etc/").with_blacklist().is_valid()
    assert DirectoryValidator("/etc/x").with_blacklist().is_valid()
    assert not DirectoryValidator("/etc/x").with_blacklist(exact_compare=False).is_valid()
    assert DirectoryValidator("/etcetera").with_blacklist(exact_compare=False).is_valid()
    assert not DirectoryValidator("/a").with_blacklist(["/a"], msg="no").is_valid()


def test_sensitive_words_are_checked_in_the_last_part_only() -> None:
    words = DirectoryValidator.should_not_contains_sensitive_words
    assert not words(DirectoryValidator("/a/myprivatekey")).is_valid()
    assert words(DirectoryValidator("/privatekey/a")).is_valid()
    assert words(DirectoryValidator("/privatekey/")).is_valid()
    assert not words(DirectoryValidator("/a/b"), ["b"]).is_valid()


def test_child_path_is_resolved_before_the_check(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/")
    below = DirectoryValidator.check_is_children_path
    assert below(str(tmp_path), str(tmp_path / "x"))
    assert not below(str(tmp_path), str(tmp_path / "out" / "x"))
    assert not below(str(tmp_path), str(tmp_path) + "2")
    assert not below(str(tmp_path), "")


@pytest.mark.parametrize(
    ("text", "prefix", "result"),
    [
        ("ab", "a", (True, "b")),
        ("ab", "b", (False, "ab")),
        ("a", "ab", (False, "a")),
        ("ab", None, (False, "ab")),
        (None, "a", (False, None)),
    ],
)
def test_prefix_is_removed_where_there_is_one(
    text: str | None, prefix: str | None, result: tuple[bool, str | None]
) -> None:
    assert DirectoryValidator.remove_prefix(text, prefix) == result


def test_directory_with_too_many_entries_is_refused(tmp_path: Path) -> None:
    for number in range(4097):
        os.close(os.open(tmp_path / str(number), os.O_CREAT))
    assert not DirectoryValidator(str(tmp_path)).check_dir_file_number().is_valid()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("[10.0.0.1]", "10.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "[::]"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("2001:DB8::0:1", "[2001:DB8::0:1]"),
    ],
)
def test_ip_addresses_are_ready_for_host_port(address: str, expected: str) -> None:
    assert pre_handle_ip(address) == (expected, None)


@pytest.mark.parametrize("address", ["", None, "host", "1.2.3", "[[::1]]", "[::1", "1.2.3.4:80", 7])
def test_invalid_ip_addresses_are_refused(address: str | None) -> None:
    text, error = pre_handle_ip(address)
    assert text == ""
    assert isinstance(error, ValueError)
