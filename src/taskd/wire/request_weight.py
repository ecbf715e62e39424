"""How much work a request makes, from its bytes, before it is parsed.

An empty sub-message has two bytes on the wire, and costs a server as much time and memory as one
with content. So each counts as a number of bytes, at whichever depth, and so does each text of a
list and each number of a list.
"""

from __future__ import annotations

from typing import Any

NUMBER_BYTES, FIELD_BYTES = 4, 16
"""What each number of a list counts, at least; and, on average, each field of the request itself:
reading it takes time, too."""
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))
"""In a list of numbers, each has one byte that is not one of these."""


class RequestWeight:
    """For requests of one type, as `google.protobuf` describes it."""

    def __init__(self, described: Any, part_bytes: int) -> None:
        """`part_bytes`: what each sub-message, and each text of a list, counts at least."""
        self._part_bytes = part_bytes
        self._lists: dict[Any, dict[int, Any]] = {}
        self._described = described

    def __call__(self, raw: bytes, most: int) -> int:
        """The size of the request, or more. As soon as it is above `most`, the rest is not read."""
        weight, size, left = 0, len(raw), most // FIELD_BYTES
        waiting = [(0, size, self._described)]
        while waiting:
            at, end, described = waiting.pop()
            fields = self._fields(described)
            while at < end:
                left -= 1
                tag, at = read_varint(raw, at)
                kind = tag & 7
                if kind == _DELIMITED:
                    length, at = read_varint(raw, at)
                    inner = fields.get(tag >> 3, 0)
                    if inner is None:  # a list of numbers
                        numbers = len(raw[at : at + length].translate(None, _CONTINUED))
                        weight += max(length, NUMBER_BYTES * numbers)
                    elif inner != 0:
                        weight += max(length, self._part_bytes)
                        if not isinstance(inner, str) and length and self._fields(inner):
                            waiting.append((at, min(at + length, end), inner))
                    at += length
                elif kind == _VARINT:
                    _, at = read_varint(raw, at)
                    weight += NUMBER_BYTES if tag >> 3 in fields else 0
                elif kind in (_FIXED32, _FIXED64):
                    at += 4 if kind == _FIXED32 else 8
                else:
                    return size  # a group, or no message at all: the parser refuses it
                if weight > most or left < 0:
                    return max(weight, most + 1)
        return max(weight, size)

    def _fields(self, described: Any) -> dict[int, Any]:
        """Of sub-messages their type, of lists of texts "", of lists of numbers None."""
        if described not in self._lists:
            self._lists[described] = {
                field.number: field.message_type
                if field.message_type is not None
                else ("" if field.cpp_type == field.CPPTYPE_STRING else None)
                for field in described.fields
                if field.message_type is not None or is_list(field)
            }
        return self._lists[described]


def is_list(field: Any) -> bool:
    """Older versions of protobuf have a label, newer ones a property."""
    repeated = getattr(field, "is_repeated", None)
    if repeated is None:
        return bool(field.label == field.LABEL_REPEATED)
    return bool(repeated() if callable(repeated) else repeated)


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number, and where the next one begins."""
    value = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at
