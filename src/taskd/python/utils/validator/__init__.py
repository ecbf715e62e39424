"""Chained checks of values from outside: `IntValidator(x, 0, 9).check_value().is_valid()`."""

from taskd.python.utils.validator.paths import DirectoryValidator, FileValidator
from taskd.python.utils.validator.values import (
    ClassValidator,
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
