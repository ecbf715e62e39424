"""The largest requests of each method: as many parts as possible, in each of its lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taskd.clusterd.interceptors import CHEAP_PART_BYTES, CHEAP_PARTS, PART_BYTES
from taskd.wire.request_weight import NUMBER_BYTES, is_list


def requests_of(method: Any, job: str, limit: int) -> Iterator[tuple[str, bytes]]:
    """What it is, and the request: as large as the wire allows, and as what is parsed allows."""
    described = method.input_type
    own = next(field for field in described.fields if field.name in ("jobId", "jobID", "job"))
    head = _wrapped(own, job.encode())
    if (incident := described.fields_by_name.get("incident")) is not None:
        head += _tag(incident, 0) + b"\x01"
    part = CHEAP_PART_BYTES if method.name in CHEAP_PARTS else PART_BYTES
    room = limit - 300
    for name, most in (("bytes", room), ("parts", room // part), ("numbers", room // NUMBER_BYTES)):
        for path, body in _lists(described, most, room):
            if name == "numbers" and not path.endswith("numbers"):
                continue
            yield f"{method.name} {path}, most {name}", head + body


def _lists(described: Any, most: int, room: int, path: str = "") -> Iterator[tuple[str, bytes]]:
    for field in described.fields:
        is_text = field.cpp_type == field.CPPTYPE_STRING
        if is_list(field) and (field.message_type is not None or is_text):
            one = _tag(field, 2) + b"\0"
            yield path + field.name, one * min(most, room // len(one))
        elif is_list(field):
            yield f"{path}{field.name} numbers", _wrapped(field, bytes(min(most, room)))
        if field.message_type is not None:
            inner = _lists(field.message_type, most, room - 30, f"{path}{field.name}/")
            for name, body in inner:
                yield name, _wrapped(field, body)


def _wrapped(field: Any, content: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(content)) + content


def _tag(field: Any, kind: int) -> bytes:
    return _varint(field.number << 3 | kind)


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])
