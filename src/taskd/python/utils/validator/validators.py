"""Documented import path of the validators: `IntValidator(x, 0, 9).check_value().is_valid()`."""

from taskd.ascend.documented.validators import (
    ClassValidator,
    DirectoryValidator,
    FileValidator,
    IntValidator,
    MapValidator,
    RankSizeValidator,
    StringValidator,
    Validator,
)

__all__ = [
    "ClassValidator",
    "DirectoryValidator",
    "FileValidator",
    "IntValidator",
    "MapValidator",
    "RankSizeValidator",
    "StringValidator",
    "Validator",
]
