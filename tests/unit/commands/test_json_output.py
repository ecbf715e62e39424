from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from taskd.commands.render import as_json
from taskd.wire._pb import control_pb2 as pb
from tests.json_schema import check, schema

PRINTED: dict[str, Message] = {
    "status": pb.JobStatus(),
    "jobs": pb.JobList(),
    "replay": pb.HistoryLine(),
}
TYPES = {
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_INT64: "integer",
    FieldDescriptor.TYPE_INT32: "integer",
    FieldDescriptor.TYPE_BOOL: "boolean",
    FieldDescriptor.TYPE_STRING: "string",
}


def full_status() -> pb.JobStatus:
    fault = pb.JobFault(rank=3, fault_type="1", evidence="exit code -9")
    return pb.JobStatus(
        line=pb.JobLine(job="j", step=2**53 - 1, incident=7, steps_per_s=3.5, subscribed=True),
        strategies=["recover-in-place", "exit"],
        deadline_unix_ms=1_700_000_000_000,
        faults=[fault],
        ranks=[pb.RankStatus(rank=0, host="a", pid=12, phase="training", step=41, idle_s=0.5)],
        rounds=[pb.Round(incident=6, began_unix_ms=5, took_ms=120, faults=[fault])],
        stragglers=[pb.Straggler(rank=1, cause="compute", late_ms=1.5, slower=0.25)],
        places=[pb.Place(rank=0, node="n", device="0")],
        goodput=0.97,
        nodes=[pb.NodeStatus(node=0, host="a", present=True, only_here=["s"])],
    )


@pytest.mark.parametrize("command", [*PRINTED, "doctor"])
def test_schema_is_valid(command: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(command))


@pytest.mark.parametrize("command", PRINTED)
def test_schema_describes_every_field_with_its_type(command: str) -> None:
    described = schema(command)
    compare(described, described.get("$defs", {}), PRINTED[command].DESCRIPTOR)


def compare(described: dict[str, Any], defs: dict[str, Any], message: Any) -> None:
    assert list(described["properties"]) == [field.json_name for field in message.fields]
    assert described["required"] == list(described["properties"])
    for field in message.fields:
        kind = described["properties"][field.json_name]
        kind = kind.get("items", kind)
        if field.message_type:
            name = field.message_type.name
            assert kind["$ref"] == f"#/$defs/{name}"
            compare(defs[name], defs, field.message_type)
        else:
            assert kind["type"] == TYPES[field.type]


def test_numbers_are_numbers() -> None:
    output = check("status", as_json(full_status()))
    assert output["line"]["step"] == 2**53 - 1
    assert output["line"]["incident"] == 7
    assert output["rounds"][0]["tookMs"] == 120
    assert output["ranks"][0]["idleS"] == 0.5


@pytest.mark.parametrize("command", PRINTED)
def test_fields_of_an_empty_message_are_present(command: str) -> None:
    output = check(command, as_json(PRINTED[command]))
    assert set(output) == set(schema(command)["required"])


def test_output_is_one_line_with_readable_text() -> None:
    text = as_json(pb.HistoryLine(because="über\nzwei", commands=["a", "b"]))
    assert "\n" not in text
    assert "über" in text
    assert json.loads(text)["commands"] == ["a", "b"]
