"""Chained checks of values from outside: `IntValidator(x, 0, 9).check_value().is_valid()`."""

from taskd.ascend.toolkit.path_validators import DirectoryValidator, FileValidator
from taskd.ascend.toolkit.value_validators import (
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
